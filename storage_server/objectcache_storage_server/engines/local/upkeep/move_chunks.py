"""Moves chunks together, a little at a time, and has them encoded as their bucket's policy says.

Reads them, writes them into one extent, and has the index name the new place. A chunk that changed
or is read meanwhile stays where it is. Where all lie well, those are written again that the policy
wants otherwise, while neither readers nor puts use the device.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence

import numpy as np

from objectcache_runtime.settings import StorageSettings
from objectcache_schemas.errors import Busy, DamagedData, ObjectCacheError, StorageFull
from objectcache_schemas.records import BucketInfo, Verification
from objectcache_storage_server.engines.base import PrefixShape
from objectcache_storage_server.engines.local.commits.judged_commit import fill_rows
from objectcache_storage_server.engines.local.objects.stored_objects import StoredObjects
from objectcache_storage_server.engines.local.puts.encode_extents import NotShorter, RowEncoder
from objectcache_storage_server.engines.local.puts.staged_prefix import LocalStagedPrefix
from objectcache_storage_server.engines.local.puts.writer_space import WriterSpace
from objectcache_storage_server.engines.local.records import Version
from objectcache_storage_server.engines.local.upkeep.plan_compaction import (
    Move,
    candidate_count,
    plan_moves,
)
from objectcache_storage_server.engines.local.upkeep.plan_encoding import plan_encoding

MOVES_MAX = 64  # of one plan
PLAN_EVERY_S = 5.0  # a plan looks at every object
ENCODE_AGAIN_S = 60.0  # after there was no room: what was encoded is lost each time

log = logging.getLogger("objectcache.storage_server.engines.local.compactor")


class Compactor:
    """Carries out plans at the rate that the settings allow."""

    def __init__(
        self,
        stored: StoredObjects,
        space: WriterSpace,
        settings: StorageSettings,
        extent_bytes_max: int,
        clock: Callable[[], float],
        row_encoder: Callable[[BucketInfo], RowEncoder | None],
    ) -> None:
        """`space` gives out extents without evicting for them; `clock` tells objects' time;
        `row_encoder` says how a bucket's chunks are to be stored.
        """
        self.moved_objects = self.moved_bytes = self.candidates = 0
        self.reencoded_objects = self.reencoded_bytes = self.waiting_bytes = 0
        self._stored = stored
        self.space = space
        self._settings = settings
        self.extent_bytes_max = extent_bytes_max
        self._clock = clock
        self._row_encoder = row_encoder
        self._moves: list[Move] = []
        self._planned_s = float("-inf")
        # What was so when nothing was left to move: the clock of uses, objects, codecs of buckets.
        self._settled: tuple[int, int, dict[int, int]] | None = None
        self._encode_next_s = float("-inf")
        self._allowed_bytes = 0.0
        self._last_s: float | None = None

    @property
    def state(self) -> str:
        """In words, for operators."""
        if self._settings.compaction_bytes_per_s == 0:
            return "off"
        if not self._moves:
            return "idle"
        doing = "moving" if self._moves[0].codec is None else "encoding"
        return f"{doing}, {len(self._moves)} extents to go"

    def round(self, now_s: float) -> None:
        """Move what the time since the last round allows."""
        rate = self._settings.compaction_bytes_per_s
        if rate == 0:
            return
        elapsed_s = 0.0 if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        # At most a second's worth is saved up; one extent may overdraw it.
        self._allowed_bytes = min(float(rate), self._allowed_bytes + rate * elapsed_s)
        if not self._moves and now_s - self._planned_s >= PLAN_EVERY_S:
            self._planned_s = now_s
            self._plan(now_s)
        path_use = self._stored.path_use
        is_quiet = path_use.is_quiet(now_s)  # before there are reads of our own
        while self._moves and self._allowed_bytes > 0:
            may_encode = is_quiet and path_use.is_left_alone(now_s)
            if self._moves[0].codec is not None and not may_encode:
                return
            move = self._moves.pop(0)
            self._allowed_bytes -= move.geometry.chunk_bytes * len(move.numbers)
            self._carry_out(move, now_s)

    def _plan(self, now_s: float) -> None:
        stored, settings = self._stored, self._settings
        codecs = self._codecs()
        state = (stored.holdings.clock_of_uses, len(stored.holdings.objects), codecs)
        if state == self._settled:
            return
        objects, extents = stored.holdings.snapshot()
        self._objects = objects
        self.candidates = candidate_count(
            objects, extents, settings.extent_row_bytes, self.extent_bytes_max
        )
        is_read = bool(extents["readers"].any())  # and may be a candidate when it is not
        if self.candidates:
            self._moves = plan_moves(
                objects,
                extents,
                row_bytes=settings.extent_row_bytes,
                extent_bytes_max=self.extent_bytes_max,
                now_s=self._clock(),
                idle_s=settings.compaction_idle_s,
                moves_max=MOVES_MAX,
            )
        may_encode = not self._moves and now_s >= self._encode_next_s
        encoding = plan_encoding(
            objects,
            extents,
            codecs,
            extent_bytes_max=self.extent_bytes_max,
            now_s=self._clock(),
            idle_s=settings.compaction_idle_s,
            moves_max=MOVES_MAX if may_encode else 0,
        )
        self.waiting_bytes = encoding.waiting_bytes
        self._moves += encoding.moves
        is_settled = not (self.candidates or self.waiting_bytes or is_read)
        self._settled = state if is_settled else None

    def _codecs(self) -> dict[int, int]:
        """By bucket number the codec that its chunks are to be given to, 0 for none."""
        with self._stored.index.reading() as view:
            rows = view.bucket_rows()
        return {row.number: _codec_of(self._row_encoder(row.info)) for row in rows}

    def _carry_out(self, move: Move, now_s: float) -> None:
        try:
            versions = self._versions(move)
            if len(versions) == len(move.numbers) and not self._are_read(versions):
                self._move_whole(move, versions)
        except (StorageFull, Busy):
            self._moves.clear()  # room and memory are for puts
            self._encode_next_s = now_s + ENCODE_AGAIN_S
        except ObjectCacheError as error:
            log.warning("compaction goes on after: %s", error)

    def _move_whole(self, move: Move, versions: Sequence[Version]) -> None:
        """Move chunks; one that is not what was stored is dropped instead, and the others stay."""
        try:
            self._move(move, versions)
        except DamagedData as damage:
            by_key = {version.info.key: version for version in versions}
            damaged = by_key.get(damage.details.key or "")
            if damaged is None:
                raise
            self._stored.drop_damaged(damaged, str(damage))

    def _versions(self, move: Move) -> list[Version]:
        """The chunks of a move, those that are still what the plan saw."""
        found: list[Version] = []
        with self._stored.index.reading() as view:
            names = [view.name_of(number) for number in move.numbers]
            keys = [name[1] for name in names if name is not None and name[0] == move.bucket]
            stored = view.versions(move.bucket, keys)
        for number, name in zip(move.numbers, names, strict=True):
            version = stored.get(name[1]) if name is not None else None
            if version is not None and version.serial == int(self._objects["serial"][number]):
                found.append(version)
        return found

    def _are_read(self, versions: Sequence[Version]) -> bool:
        extents = np.array(sorted({n for version in versions for n in version.extents}), np.int64)
        with self._stored.holdings.lock:
            return bool(self._stored.holdings.extents.rows["readers"][extents].any())

    def _move(self, move: Move, versions: Sequence[Version]) -> None:
        stored, geometry = self._stored, move.geometry
        keys = [version.info.key for version in versions]
        shape = PrefixShape(keys, geometry.num_layers, geometry.slice_bytes, layerwise=False)
        encoder = self._encoder_of(move.bucket)
        if move.codec not in (None, _codec_of(encoder)):
            return  # the policy is another one by now
        if encoder is not None:
            encoder.verification = Verification.FULL  # it is in place of what was compared before
            encoder.only_shorter = move.codec is not None and not self._are_encoded(versions)
        prefix = LocalStagedPrefix(
            self.space, "", shape, [geometry], encoder, self.extent_bytes_max
        )
        try:
            with stored.holdings.looking_up():
                versions = self._still_stored(move.bucket, versions)
                if len(versions) < len(keys):
                    return
                opened = stored.open_versions(versions)
            with contextlib.closing(opened):
                chunk = memoryview(bytearray(geometry.chunk_bytes))
                for index in range(len(versions)):
                    opened.read_into(index, 0, chunk)
                    prefix.write(index * geometry.chunk_bytes, chunk)
            prefix.finish()
            stored.flushes.flush([prefix.place(0)[0]])
            self._count(move, self._rename(versions, prefix))
        except NotShorter:
            assert move.codec is not None
            self._note_codec(versions, move.codec)
        finally:
            prefix.discard()

    def _count(self, move: Move, moved: Sequence[Version]) -> None:
        moved_bytes = sum(version.info.size_bytes for version in moved)
        if move.codec is None:
            self.moved_objects += len(moved)
            self.moved_bytes += moved_bytes
        else:
            self.reencoded_objects += len(moved)
            self.reencoded_bytes += moved_bytes
            self.waiting_bytes = max(0, self.waiting_bytes - moved_bytes)

    def _are_encoded(self, versions: Sequence[Version]) -> bool:
        return any(version.frame_checksums is not None for version in versions)

    def _note_codec(self, versions: Sequence[Version], codec: int) -> None:
        """Chunks of one plain extent do not get shorter with this codec: nobody tries again."""
        stored, holdings = self._stored, self._stored.holdings
        version = versions[0]
        with stored.changing:
            if not self._still_stored(version.bucket_number, versions):
                return
            with holdings.lock:
                rows = holdings.extents.rows[list(version.extents)]
            rows["codec"] = codec
            with stored.index.writing(durable=False) as change:
                change.add_extents(version.extents, rows)
            holdings.set_codec(version.extents[0], codec)

    def _encoder_of(self, bucket_number: int) -> RowEncoder | None:
        with self._stored.index.reading() as view:
            rows = [row for row in view.bucket_rows() if row.number == bucket_number]
        return self._row_encoder(rows[0].info) if rows else None

    def _still_stored(self, bucket_number: int, versions: Sequence[Version]) -> list[Version]:
        with self._stored.index.reading() as view:
            stored = view.versions(bucket_number, [version.info.key for version in versions])
        return [
            version
            for version in versions
            if (now := stored.get(version.info.key)) is not None and now.serial == version.serial
        ]

    def _rename(self, versions: Sequence[Version], prefix: LocalStagedPrefix) -> Sequence[Version]:
        """Returns the versions that lie elsewhere now."""
        stored, holdings = self._stored, self._stored.holdings
        new = prefix.moved(versions)
        with stored.changing:
            if self._are_read(versions):
                return ()
            with stored.index.writing(durable=False) as change:
                with holdings.lock:
                    rows = holdings.objects.rows[[version.number for version in versions]]
                    extent_rows = holdings.extents.rows[[new[0].extents[0]]]
                    pitches = holdings.pitches_of([new[0].extents[0]])
                change.add_extents([new[0].extents[0]], extent_rows, pitches)
                fill_rows(rows, new)
                moved = [
                    index
                    for index, version in enumerate(versions)
                    if change.move(version.name, new[index], rows[index : index + 1])
                ]
                if not moved:
                    change.remove_extents([new[0].extents[0]])
                old = [versions[index] for index in moved]
                emptied = holdings.emptied_by(old)
                change.remove_extents(emptied)
                change.unmark_unflushed(emptied)
            holdings.move([new[index] for index in moved], old, rows[moved])
            for index in moved:
                prefix.keep(index)
        stored.index.sync()
        stored.flusher.drop(emptied)
        return old


def _codec_of(encoder: RowEncoder | None) -> int:
    return 0 if encoder is None else int(encoder.codec)
