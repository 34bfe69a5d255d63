"""The engine contract.

Every method blocks and may be called from any thread; the storage server calls them from worker
threads. Errors are those of `objectcache_schemas.errors`, translated where the engine meets the
system; nothing above an engine catches `OSError`.

Buckets whose name begins with a dot belong to the storage server itself; `buckets` does not list
them.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from objectcache_encodings.frames import SliceCodec
from objectcache_schemas.errors import (
    NotFound,
    ObjectCacheError,
    PreconditionFailed,
    Unsupported,
)
from objectcache_schemas.layout import KvLayout
from objectcache_schemas.limits import KIB, MIB
from objectcache_schemas.operators.engine_status import CheckpointTaken, CheckReport, EngineStatus
from objectcache_schemas.records import (
    BucketConfiguration,
    BucketInfo,
    BucketPolicy,
    Condition,
    ObjectAttributes,
    ObjectInfo,
)
from objectcache_storage_server.engines.block_checksums import slice_block_bytes
from objectcache_storage_server.engines.puts.received_frames import ReceivedFrames

CHECKSUM_BLOCK_BYTES = 64 * KIB  # where no slice size is known
ALWAYS = Condition()
NO_ATTRIBUTES = ObjectAttributes()
BUCKET_PAGE = 100  # buckets read at once; their configurations have 256 KiB at most
COPY_BYTES = 1 * MIB  # piece of a copy through memory; a multiple of CHECKSUM_BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """What an engine can do; asked, never found out by trying."""

    name: str
    # Calls of `OpenObjects.begin_reads`, each a batch of reads, to have under way at a time. 0: it
    # reads by waiting, so call `read_many`, in as many threads as are to read.
    queue_depth: int = 0
    read_bytes: int = 0  # of a batch that it is quickest with; 0: the larger the better


class Placement(NamedTuple):
    """Where one object's bytes lie in its source: stored slice l is at base + l * stride.

    `slice_bytes` is the stored slice, which a chunk is cut into where neighbours lie between its
    layers; 0 is an object in one contiguous run.
    """

    source: int
    base_bytes: int
    slice_bytes: int = 0
    stride_bytes: int = 0  # from a stored slice to the next, at least `slice_bytes`

    def runs(self, offset_bytes: int, length_bytes: int) -> list[tuple[int, int]]:
        """A range of the object as (offset in the source, length) of contiguous runs, in order."""
        if not self.slice_bytes:
            return [(self.base_bytes + offset_bytes, length_bytes)] if length_bytes else []
        runs: list[tuple[int, int]] = []
        position, end = offset_bytes, offset_bytes + length_bytes
        while position < end:
            layer, skip = divmod(position, self.slice_bytes)
            run_bytes = min(self.slice_bytes - skip, end - position)
            runs.append((self.base_bytes + layer * self.stride_bytes + skip, run_bytes))
            position += run_bytes
        return runs


class Read(NamedTuple):
    """One contiguous read of a source, and where it lands in the caller's buffer."""

    source: int
    offset_bytes: int
    length_bytes: int
    landing_offset_bytes: int


class FrameRows(NamedTuple):
    """Neighbours whose slices are stored as frames: that of layer l in slot j is the `pitches[l]`
    bytes at `offsets[l] + j * pitches[l]` of `source`, which is read in whole frames.
    """

    source: int
    codec: SliceCodec  # whose readers can decode all of them
    pitches: tuple[int, ...]
    offsets: tuple[int, ...]


class FramePlace(NamedTuple):
    """Where one object's slices lie as frames."""

    rows: FrameRows
    slot: int


class StagedPut(NamedTuple):
    """A staged object with what will be stored beside its bytes.

    An empty `etag` asks the commit for `content_etags.content_etag` of what was written: the same
    bytes in stored blocks of the same size have the same one in every engine.
    """

    staged: Staged
    etag: str
    attributes: ObjectAttributes = NO_ATTRIBUTES


class Committed(NamedTuple):
    """One object of a commit. `existed`: under an immutable key the same bytes were stored already;
    `info` is then what is stored.
    """

    info: ObjectInfo
    existed: bool


class BucketTotals(NamedTuple):
    """What a bucket holds."""

    object_count: int
    stored_bytes: int
    encoded_bytes: int = 0  # of the frames of its chunks that are stored encoded
    decoded_bytes: int = 0  # of those chunks, among the stored ones


@dataclass(frozen=True, slots=True)
class PrefixShape:
    """The chunks of one put, and the order in which their bytes arrive.

    `keys` are distinct and in prefix order. Layerwise, the payload is for each layer, for each
    chunk, its slice of `slice_bytes`; otherwise chunk after chunk. `parent_key` is the chunk before
    the first one, where it is known. With `encoded_bytes` the payload comes encoded, layerwise, and
    has so many bytes: an engine is given its frames, or what they decode to.
    """

    keys: Sequence[str]
    num_layers: int
    slice_bytes: int
    layerwise: bool
    parent_key: str | None = None
    encoded_bytes: int | None = None

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk."""
        return self.num_layers * self.slice_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all chunks."""
        return len(self.keys) * self.chunk_bytes

    @property
    def wire_bytes(self) -> int:
        """Bytes of the payload as it comes."""
        return self.total_bytes if self.encoded_bytes is None else self.encoded_bytes

    def locate(self, position_bytes: int) -> tuple[int, int, int]:
        """Where a byte of the payload belongs: chunk, offset in it, bytes that follow it there."""
        if not self.layerwise:
            chunk, offset_bytes = divmod(position_bytes, self.chunk_bytes)
            return chunk, offset_bytes, self.chunk_bytes - offset_bytes
        number, skip_bytes = divmod(position_bytes, self.slice_bytes)
        layer, chunk = divmod(number, len(self.keys))
        return chunk, layer * self.slice_bytes + skip_bytes, self.slice_bytes - skip_bytes


class Staged(ABC):
    """An object being written, visible to nobody until `Engine.commit`.

    One thread writes to it at a time.
    """

    bucket: str
    key: str
    checksum_block_bytes: int

    @abstractmethod
    def write_at(self, offset_bytes: int, data: memoryview) -> None:
        """Store `data` at `offset_bytes`, in any order, each byte once.

        `offset_bytes` is a multiple of `checksum_block_bytes`, and so is the length unless the
        write ends the object. The data may be reused when the call returns. Raises `StorageFull`,
        `Busy` and `Unavailable`.
        """

    @abstractmethod
    def discard(self) -> None:
        """Forget the object and its space. No effect after a commit, or a second time."""


class StagedPrefix(ABC):
    """The chunks of one put being written, visible to nobody until `Engine.commit` of `staged`."""

    staged: Sequence[Staged]  # one a chunk, in the shape's order

    @abstractmethod
    def write(self, position_bytes: int, data: memoryview) -> None:
        """Store the payload's next bytes: each call begins where the one before ended, at 0 first.

        The data may be reused when the call returns; one thread writes at a time. Every position
        but the last end is a multiple of the chunks' checksum block. Raises `StorageFull`, `Busy`
        and `Unavailable`.
        """

    def write_frames(self, position_bytes: int, frames: ReceivedFrames) -> None:
        """Store the payload's next slices, which come as frames; `position_bytes` is that of the
        first of them among all slices. Otherwise as `write`, and raises `InvalidRequest`
        (BadDigest) for a frame that is damaged.

        An engine that stores frames overrides it, and decodes every one of them before.
        """
        self.write(position_bytes, frames.decoded().reshape(-1).data)

    def discard(self) -> None:
        """Forget what was not committed, and its space. A second call has no effect."""
        for staged in self.staged:
            staged.discard()


class BegunReads(ABC):
    """Reads under way. The engine writes to their landing memory until they have landed."""

    @abstractmethod
    def when_landed(self, call: Callable[[], None]) -> None:
        """Have `call` called once, in any thread, as soon as `finish` need not wait: now, perhaps.
        It must not wait for anything.
        """

    @abstractmethod
    def finish(self) -> None:
        """Wait until they have landed, and verify them. To be called once. Raises as `read_many`,
        and `Unavailable` for what was cancelled.
        """

    @abstractmethod
    def cancel(self) -> None:
        """Nobody wants them any more. They still land, earlier where the engine can have it so."""


class EndedReads(BegunReads):
    """Reads that have landed, or failed, before they could be waited for."""

    def __init__(self, error: ObjectCacheError | None) -> None:
        self._error = error

    def when_landed(self, call: Callable[[], None]) -> None:
        call()

    def finish(self) -> None:
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """They have landed."""


class OpenObjects(ABC):
    """Objects held for reading: their bytes do not change until `close`, whatever else happens.

    `infos` is in the order asked; None where nothing is stored. Reads may run in many threads at
    once, but not at the same time as `close`.
    """

    infos: Sequence[ObjectInfo | None]

    @abstractmethod
    def placements(self) -> Sequence[Placement]:
        """Where each object's bytes lie; only when every object is stored."""

    def frames(self) -> Sequence[FramePlace | None] | None:
        """Where each object's slices lie as frames, if they do; None where no object's do. Reads of
        a source of frames bring them as they are stored, checked as any bytes are. Only when every
        object is stored.
        """
        return None

    @abstractmethod
    def read_many(self, reads: Sequence[Read], buffer: memoryview) -> None:
        """Carry out every read into the caller's writable `buffer`, checked against checksums.

        On an error the buffer's content is undefined. Raises `DamagedData` with
        `details.key` where bytes do not match their checksum; the object is dropped from the index,
        so that it reads as missing from then on. Raises `Unavailable` where the bytes could not be
        had, in time or at all, and `Busy`: neither says anything of the object, which stays.
        """

    def begin_reads(self, reads: Sequence[Read], buffer: memoryview) -> BegunReads:
        """The same, begun and ended apart; raises nothing that a read may fail with.

        Worth it with an engine whose `capabilities.queue_depth` is not 0: it lets as many batches
        be under way. Here all is done before it returns. What was begun must be finished before
        `close`.
        """
        error: ObjectCacheError | None = None
        try:
            self.read_many(reads, buffer)
        except ObjectCacheError as caught:
            error = caught
        return EndedReads(error)

    @abstractmethod
    def close(self) -> None:
        """Let go of them. A second call has no effect."""

    def read_into(self, index: int, offset_bytes: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of object `index` from `offset_bytes` on."""
        place = self.placements()[index]
        landing_bytes = 0
        reads: list[Read] = []
        for start_bytes, length_bytes in place.runs(offset_bytes, len(buffer)):
            reads.append(Read(place.source, start_bytes, length_bytes, landing_bytes))
            landing_bytes += length_bytes
        self.read_many(reads, buffer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Engine(ABC):
    """A place where objects live."""

    capabilities: EngineCapabilities

    # --- buckets ---

    @abstractmethod
    def create_bucket(self, bucket: BucketInfo) -> None:
        """Create it. Raises `Conflict`: BucketAlreadyOwnedByYou, or BucketAlreadyExists if the
        owner differs.
        """

    @abstractmethod
    def bucket(self, name: str) -> BucketInfo:
        """Look it up. Raises `NotFound` (NoSuchBucket), as every method below does."""

    def fresh_bucket(self, name: str) -> BucketInfo:
        """The same with all that was changed before this call, also by other servers of the store,
        which may have to be asked. Raises `Unavailable`.
        """
        return self.bucket(name)

    @abstractmethod
    def buckets(self, after: str = "", limit: int | None = None) -> list[BucketInfo]:
        """Buckets after this name, by name, without those that begin with a dot."""

    def each_bucket(self) -> Iterator[BucketInfo]:
        """The same, a page at a time: what tenants configured is never in memory as a whole."""
        after = ""
        while page := self.buckets(after, BUCKET_PAGE):
            yield from page
            after = page[-1].name

    @abstractmethod
    def delete_bucket(
        self, name: str, judge: Callable[[BucketInfo], None] = lambda _: None
    ) -> None:
        """Delete it if it is empty. Raises `Conflict` (BucketNotEmpty), and what `judge` raises,
        which is shown the bucket that would be deleted, maybe more than once.
        """

    @abstractmethod
    def set_layout(self, name: str, layout: KvLayout) -> None:
        """Give it a KV layout; the same layout again is a success.

        Raises `Conflict` (KvLayoutConflict) where it has another, or holds any object whose size is
        not `layout.chunk_bytes`.
        """

    def set_policy(self, name: str, policy: BucketPolicy) -> None:
        """Replace a bucket's policy, durably. Raises `Unsupported` for what the engine lacks."""
        self.bucket(name)
        if policy != BucketPolicy():
            raise Unsupported(f"engine {self.capabilities.name} has no bucket policies; local has")

    @abstractmethod
    def configure_bucket(
        self,
        name: str,
        configuration: BucketConfiguration,
        replaces: BucketConfiguration | None = None,
    ) -> None:
        """Replace a bucket's configuration, durably. The engine keeps it and does not act on it.

        Raises `Conflict` (OperationAborted) where another than `replaces` is in force, if that is
        given.
        """

    @abstractmethod
    def usage(self, name: str) -> BucketTotals:
        """What a bucket holds, from counters: work does not grow with the bucket."""

    # --- writing ---

    @abstractmethod
    def stage(
        self, bucket: str, key: str, checksum_block_bytes: int = CHECKSUM_BLOCK_BYTES
    ) -> Staged:
        """Begin an object. Nothing of it is visible or survives a restart until `commit`."""

    def stage_prefix(self, bucket: str, shape: PrefixShape) -> StagedPrefix:
        """Begin the chunks of one put. The `staged` of the answer are committed together.

        An engine that lays neighbours out together overrides it.
        """
        return StagedApart(self, bucket, shape)

    def stage_joined(
        self,
        bucket: str,
        key: str,
        source_bucket: str,
        sources: Sequence[ObjectInfo],
        checksum_block_bytes: int = CHECKSUM_BLOCK_BYTES,
    ) -> Staged | None:
        """An object of the bytes of others, one after the other, without a copy; None where this
        engine, or what it stored them as, needs one.

        The commit takes the bytes over: the sources are gone when it is visible. It raises
        `InvalidRequest` (InvalidPart) where one of them is no longer what `sources` says.
        """
        return None

    @abstractmethod
    def commit(self, puts: Sequence[StagedPut], condition: Condition = ALWAYS) -> list[Committed]:
        """Make all visible together, durably, or none. The keys are of one bucket and distinct.

        Returns only when a crash can no longer lose them. Under `condition.immutable` a key that
        is stored already with the same bytes is left as it is, with its ETag, and counts as a
        success. A put without an ETag is stored with one made from its content. On any error
        nothing is visible and every staged object is discarded. Raises
        `PreconditionFailed`, `Conflict` (ContentConflict), `StorageFull`; NotFound (NoSuchKey)
        for `condition.etag` without an object. A key in a bucket with a KV layout is always
        immutable, and an object of another size than the layout's chunks raises `InvalidRequest`
        (DescriptorMismatch).
        """

    @abstractmethod
    def replace_attributes(
        self, bucket: str, seen: ObjectInfo, attributes: ObjectAttributes
    ) -> ObjectInfo:
        """Replace what is stored beside an object's bytes, durably; also of an immutable object.

        Bytes, ETag and time stay. Raises `NotFound` (NoSuchKey), and `PreconditionFailed` where the
        object was changed after `seen` was read, so that nobody undoes another's change.
        """

    @abstractmethod
    def delete(self, bucket: str, keys: Sequence[str]) -> int:
        """Delete what is stored of `keys`, durably, and count it. Open objects stay readable."""

    @abstractmethod
    def expire(self, bucket: str, infos: Sequence[ObjectInfo]) -> BucketTotals:
        """Delete those objects that are still what `infos` says, durably; returns what went.

        What was put, tagged or pinned meanwhile stays, and so does all that an operator pinned.
        """

    # --- reading ---

    @abstractmethod
    def stat(self, bucket: str, key: str) -> ObjectInfo:
        """Look an object up. Raises `NotFound` (NoSuchKey)."""

    def stat_at_hand(self, bucket: str, key: str) -> ObjectInfo | None:
        """The same where nothing has to be waited for; None where `stat` says more. For an event
        loop, which must not wait. Another server of the store may have replaced the object since.
        Raises as `stat`.
        """
        return None

    @abstractmethod
    def match(self, bucket: str, keys: Sequence[str]) -> int:
        """How many leading keys are stored. Work is bounded by that number, not by `len(keys)`."""

    @abstractmethod
    def open_many(
        self, bucket: str, keys: Sequence[str], *, are_prefix: bool = False
    ) -> OpenObjects:
        """Hold objects for reading; a key that is not stored has None in `infos`.

        `are_prefix`: each key is the chunk before the next, which an engine may learn from.
        """

    def read_small(
        self, bucket: str, key: str, size_bytes_max: int
    ) -> tuple[ObjectInfo, bytes] | None:
        """A whole object that can be had without waiting for the device, verified as ever.

        None where it is larger or is not in memory: `open_many` then says more. For an event loop,
        which must not wait. Raises `NotFound`, also NoSuchKey.
        """
        return None

    @abstractmethod
    def scan(self, bucket: str, prefix: str, start_after: str, limit: int) -> list[ObjectInfo]:
        """Objects with the prefix and a key greater than `start_after`, by UTF-8 bytes of the key,
        at most `limit`.
        """

    @contextlib.contextmanager
    def scanning(
        self, bucket: str
    ) -> Generator[Callable[[str, str, int], list[ObjectInfo]], None, None]:
        """`scan` of one bucket, for several calls; an engine that can sees the same commits in all
        of them.
        """
        yield lambda prefix, start_after, limit: self.scan(bucket, prefix, start_after, limit)

    # --- the engine itself ---

    @property
    @abstractmethod
    def damaged_count(self) -> int:
        """Objects dropped since the start because their bytes failed a checksum."""

    @property
    def flush_failure(self) -> str:
        """What could not be flushed, and why: nothing is stored or deleted from then on until the
        engine is opened again. Empty while all is well.
        """
        return ""

    @property
    def store_failure(self) -> str:
        """Why what needs a store that is shared fails now, in words that anybody may read; the log
        says more. Empty while the store can be asked.
        """
        return ""

    def check_room(self, size_bytes: int) -> None:  # noqa: B027
        """Raise `StorageFull` for what could not be stored even if all else went."""

    def status(self) -> EngineStatus:
        """What the admin view shows."""
        return EngineStatus(engine=self.capabilities.name)

    def totals(self) -> EngineStatus:
        """The same for metrics, which are asked for often: without what work that grows with the
        number of objects would tell.
        """
        return self.status()

    def check(self, repair: bool, on_progress: Callable[[CheckReport], bool]) -> CheckReport:
        """Compare every stored object with its checksums, and the index with the space it names.

        `repair` drops what is bad. `on_progress` is called now and then, and ends the check early
        by answering false. Reads and writes go on meanwhile. Raises `Unsupported`.
        """
        raise Unsupported(f"engine {self.capabilities.name} has no check; local has")

    def take_checkpoint(self) -> CheckpointTaken:
        """Store a copy of the index that a server can start from, and trim the log behind the one
        before. Raises `Busy` where another is being taken, `Conflict` where another server has
        taken a later one meanwhile, `StorageFull`, `Unavailable`, `Unsupported`.
        """
        raise Unsupported(f"engine {self.capabilities.name} has no log: it takes no checkpoints")

    def pin(self, bucket: str, keys: Sequence[str], pinned: bool) -> int:
        """Keep what is stored of `keys` from eviction and expiry, or no longer; counts it.

        Survives a restart. Raises `Unsupported`.
        """
        raise Unsupported(f"engine {self.capabilities.name} does not evict; local does")

    @abstractmethod
    def close(self) -> None:
        """Release files and threads. Unfinished staged objects are lost."""

    def copy(
        self,
        source_bucket: str,
        source_key: str,
        staged: Staged,
        offset_bytes: int = 0,
        length_bytes: int | None = None,
        source_etag: str = "",
    ) -> int:
        """Write a range of a stored object to a staged one from its start; returns the bytes.

        Raises `PreconditionFailed` where the source's ETag is not `source_etag`. Through memory, in
        pieces of COPY_BYTES; an engine that can do better overrides it.
        """
        with self.open_many(source_bucket, [source_key]) as opened:
            info = opened.infos[0]
            if info is None:
                raise NotFound(f"{source_key!r} is not stored", key=source_key)
            check_etag(info, source_etag)
            end_bytes = info.size_bytes if length_bytes is None else offset_bytes + length_bytes
            assert 0 <= offset_bytes <= end_bytes <= info.size_bytes
            piece = memoryview(bytearray(min(COPY_BYTES, end_bytes - offset_bytes)))
            position = offset_bytes
            while position < end_bytes:
                part = piece[: end_bytes - position]
                opened.read_into(0, position, part)
                staged.write_at(position - offset_bytes, part)
                position += len(part)
            return end_bytes - offset_bytes


def object_block_bytes(layout: KvLayout | None) -> int:
    """The checksum block of objects in a bucket with this layout, or with none."""
    if layout is None:
        return CHECKSUM_BLOCK_BYTES
    return slice_block_bytes(layout.per_layer_chunk_bytes)


def check_etag(info: ObjectInfo, etag: str) -> None:
    """Raise `PreconditionFailed` unless `etag` is empty, "*" or the object's own."""
    if etag not in ("", "*", info.etag):
        raise PreconditionFailed(f"the ETag of {info.key!r} is {info.etag}, not {etag}")


def check_unchanged(info: ObjectInfo, seen: ObjectInfo) -> None:
    """Raise `PreconditionFailed` unless an object is still all that somebody has seen of it."""
    if info != seen:
        raise PreconditionFailed(f"{info.key!r} was changed meanwhile; look at it again")


class StagedApart(StagedPrefix):
    """One staged object a chunk, each on its own."""

    def __init__(self, engine: Engine, bucket: str, shape: PrefixShape) -> None:
        block_bytes = slice_block_bytes(shape.slice_bytes)
        staged: list[Staged] = []
        try:
            for key in shape.keys:
                staged.append(engine.stage(bucket, key, block_bytes))
        except BaseException:
            for one in staged:
                one.discard()
            raise
        self.staged = staged
        self._shape = shape

    def write(self, position_bytes: int, data: memoryview) -> None:
        for index, offset_bytes, piece in self.pieces(position_bytes, data):
            self.staged[index].write_at(offset_bytes, piece)

    def pieces(
        self, position_bytes: int, data: memoryview
    ) -> Iterator[tuple[int, int, memoryview]]:
        """Where the payload's next bytes belong: chunk, offset in it, and the bytes."""
        done = 0
        while done < len(data):
            index, offset_bytes, room_bytes = self._shape.locate(position_bytes + done)
            piece = data[done : done + room_bytes]
            yield index, offset_bytes, piece
            done += len(piece)
