"""One session's client over verbs: a queue pair, and what becomes of it.

    open --- a completion failed, the deadline passed, or `close` ---> failing
    failing --- all that was posted has been flushed, or the time for that is over ---> ended

In `failing` nothing is posted any more, and the device still holds what was. Memory that is written
from goes back when that has been flushed or the queue pair is destroyed: from then on the device
touches none of it. Of a device that does neither, staging memory is withdrawn for good, and lent
memory lost.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterable
from enum import Enum, auto
from functools import partial
from typing import NamedTuple

from objectcache_fabrics.peers import NO_LANE, FabricPeer, TrafficLane, WriteDone, WriteTimeout
from objectcache_fabrics.registered_memory import DRAM, DeviceMemory, RemoteMemory
from objectcache_fabrics.verbs.address import Announcement, VerbsAddress
from objectcache_fabrics.verbs.completion_thread import CompletionThread
from objectcache_fabrics.verbs.device import VerbsDevice
from objectcache_fabrics.verbs.queue_pair import SEGMENTS_MAX, Completion, QueuePair, Segment
from objectcache_fabrics.verbs.send_queue import SendQueue, TransferKind, VerbsTransfer, Work
from objectcache_fabrics.verbs.source_memory import SourceMemory
from objectcache_schemas.errors import DeliveryFailed, InvalidRequest, ObjectCacheError, Unavailable

SEND_DEPTH = 32  # writes under way; of fragments, more than any link holds
FLUSH_TIMEOUT_S = 1.0  # a device flushes at once; one that does not is told to let go

logger = logging.getLogger("objectcache.fabrics.verbs")


class _State(Enum):
    OPEN = auto()
    FAILING = auto()
    ENDED = auto()


class _Lent(NamedTuple):
    local_key: int
    lost: Callable[[], None]


class VerbsPeer(FabricPeer):
    """A client on a queue pair of its own."""

    def __init__(
        self,
        device: VerbsDevice,
        sources: SourceMemory,
        thread: CompletionThread,
        client: VerbsAddress,
        timeout: WriteTimeout,
        lane: TrafficLane = NO_LANE,
    ) -> None:
        """Connects, which may take a while. Raises `Unavailable` where the device cannot; nothing
        is left open then.
        """
        self._sources = sources
        self._lent: dict[DeviceMemory, _Lent] = {}
        self._thread = thread
        self._timeout = timeout
        self._lock = threading.Lock()
        self._state = _State.OPEN
        self._error: ObjectCacheError | None = None
        self._flush_by_s = 0.0
        self._flushed_number = -1
        self._closing = False
        self._lost = False
        self._when_broken: Callable[[], None] | None = None
        depth = min(SEND_DEPTH, device.work_max)
        self._reads_answered = client.reads
        self._queue = SendQueue(
            depth=depth,
            segments_max=min(SEGMENTS_MAX, device.segments_max),
            read_segments_max=min(SEGMENTS_MAX, device.read_segments_max),
            message_bytes_max=device.message_bytes_max,
            credits_max=client.receives,
        )
        self._pair = QueuePair(device, send_depth=depth, receive_depth=0, reads_answered=0)
        try:
            self._pair.connect(client, lane)
            self._pair.arm()
        except Unavailable:
            self._pair.close()
            raise
        self.address = self._pair.address
        thread.watch(self)

    @property
    def descriptor(self) -> int:
        """Readable when completions have come."""
        return self._pair.descriptor

    def admit(self, memory: RemoteMemory, metadata: bytes) -> None:
        if metadata or memory.memory != DRAM or memory.device_id:
            raise InvalidRequest("verbs take no metadata, and memory of the host alone")
        self._raise_if_over()

    def _raise_if_over(self) -> None:
        if self._error is not None:
            raise Unavailable(f"the client cannot be written to: {self._error.message}")

    def write(
        self, memory: RemoteMemory, offset_bytes: int, source: memoryview, done: WriteDone
    ) -> None:
        self._transfer(TransferKind.WRITE, memory, offset_bytes, source, done)

    def read(
        self, memory: RemoteMemory, offset_bytes: int, into: memoryview, done: WriteDone
    ) -> None:
        self._transfer(TransferKind.READ, memory, offset_bytes, into, done)

    def _transfer(
        self,
        operation: TransferKind,
        memory: RemoteMemory,
        offset_bytes: int,
        staged: memoryview,
        done: WriteDone,
    ) -> None:
        assert 0 <= offset_bytes <= memory.length_bytes - len(staged)
        with self._lock:
            error = self._error
            if operation is TransferKind.READ and not self._reads_answered:
                error = error or DeliveryFailed("the client answers no reads of its memory")
            if error is None:
                self._queue.add(
                    VerbsTransfer(
                        operation,
                        self._segment(staged),
                        memory.address + offset_bytes,
                        memory.key,
                        done,
                    )
                )
                self._post()
        if error is not None:
            self._thread.call(partial(done, error))

    def _segment(self, source: memoryview) -> Segment:
        """Staged or lent bytes as the device knows them; under the lock."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(source))
        memory = _containing(self._lent, address, len(source))
        key = self._sources.staging_key if memory is None else self._lent[memory].local_key
        return Segment(address, len(source), key)

    def lend(self, memory: DeviceMemory, lost: Callable[[], None]) -> None:
        with self._lock:
            if memory not in self._lent and self._state is _State.OPEN:
                self._lent[memory] = _Lent(self._sources.lend(memory), lost)

    def take_back(self, memory: DeviceMemory) -> None:
        with self._lock:
            lent = self._lent.pop(memory, None)
        if lent is not None:
            self._let_go(memory)

    def _let_go(self, memory: DeviceMemory) -> None:
        try:
            self._sources.take_back(memory)
        except Unavailable:
            logger.exception("%r is left registered to the end of the process", memory)

    def when_broken(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if not self._lost:
                self._when_broken = callback
                return
        callback()

    def announce(self, tag: int, end_layer: int) -> None:
        with self._lock:
            if self._state is _State.OPEN:
                self._queue.announce(Announcement(tag, end_layer))
                self._post()

    def forget(self, tag: int) -> None:
        with self._lock:
            self._queue.forget(tag)

    def return_credits(self, count: int) -> None:
        with self._lock:
            if self._state is _State.OPEN:
                self._queue.return_credits(count)
                self._post()

    def _post(self) -> None:
        """Give the device what its queue has room for; under the lock."""
        try:
            for work in self._queue.take(time.monotonic()):
                self._post_one(work)
        except Unavailable as error:
            self._begin_to_fail(DeliveryFailed(error.message))

    def _post_one(self, work: Work) -> None:
        if work.announcement is not None:
            self._pair.announce(work.number, work.announcement, signalled=work.signalled)
            return
        first = work.transfers[0]
        post = self._pair.write if first.operation is TransferKind.WRITE else self._pair.read
        segments = [transfer.segment for transfer in work.transfers]
        post(work.number, segments, first.address, first.key, signalled=work.signalled)

    def happened(self) -> None:
        """Completions have come: tell whom they concern, and post what waited."""
        self._pair.take_events()
        self._pair.arm()
        while completions := self._pair.poll():
            done: list[WriteDone] = []
            with self._lock:
                for completion in completions:
                    done += self._ended(completion)
                if self._state is _State.OPEN:
                    self._post()
            for tell in done:
                tell(None)
        self._end_if_flushed()

    def _ended(self, completion: Completion) -> list[WriteDone]:
        """Whose transfers are through; under the lock. What is before the first failure is."""
        now_s = time.monotonic()
        if not completion.failure:
            return self._queue.completed(completion.number, now_s)
        done: list[WriteDone] = []
        if self._state is _State.OPEN:
            done = self._queue.completed(completion.number - 1, now_s)
            self._begin_to_fail(DeliveryFailed(f"verbs: {completion.failure}"))
        self._flushed_number = completion.number
        return done

    def _begin_to_fail(self, error: ObjectCacheError) -> None:
        """Under the lock. What was posted comes back as flushed."""
        if self._state is not _State.OPEN:
            return
        self._state = _State.FAILING
        self._error = error
        self._flush_by_s = time.monotonic() + FLUSH_TIMEOUT_S
        try:
            self._pair.fail()
        except Unavailable:
            self._flush_by_s = 0.0  # destroying it lets go as well
        self._thread.call(self._end_if_flushed)

    def _end_if_flushed(self) -> None:
        """In the fabric's thread: destroy the queue pair, then say what has failed."""
        with self._lock:
            queue = self._queue
            flushed = not queue.posted_count or self._flushed_number == queue.last_number
            if self._state is not _State.FAILING or not (
                flushed or time.monotonic() > self._flush_by_s
            ):
                return
            self._state = _State.ENDED
            self._lost = not self._closing
            broken = self._when_broken if self._lost else None
            held = [] if flushed else queue.posted_segments
            lent, self._lent = self._lent, {}
            done = queue.abandon()
        self._thread.forget(self)
        try:
            self._pair.close()
        except Unavailable:
            logger.exception("%r is left to the end of the process", self._pair)
            if not self._pair.is_destroyed:
                self._withdraw(held, lent)
        for memory in lent:
            self._let_go(memory)
        if broken is not None:
            broken()
        for tell in done:
            tell(self._error)

    def _withdraw(self, segments: list[Segment], lent: dict[DeviceMemory, _Lent]) -> None:
        """The device may go on with these pieces at any time: staging memory is withdrawn, and lent
        memory is lost and taken out of `lent`.
        """
        staging = self._sources.staging
        whole = memoryview(staging.memory)
        for address, length_bytes, _ in segments:
            begin = address - staging.address
            if 0 <= begin < staging.length_bytes:
                staging.withdraw(whole[begin : begin + length_bytes])
            elif (memory := _containing(lent, address, length_bytes)) is not None:
                lent.pop(memory).lost()
        if segments:
            logger.error(
                "%d pieces of memory are out of use until this process is restarted: the device "
                "does not say that it has let go of them",
                len(segments),
            )

    def time_passed(self, now_s: float) -> None:
        """Give up a client that takes too long, and a device that does not flush."""
        with self._lock:
            waits_since_s = self._queue.waits_since_s
            if waits_since_s is not None and now_s - waits_since_s > self._timeout.timeout_s:
                self._begin_to_fail(
                    DeliveryFailed(f"the client has not taken a write within {self._timeout}")
                )
        self._end_if_flushed()

    def close(self) -> None:
        with self._lock:
            self._closing = True
            self._begin_to_fail(DeliveryFailed("the client's session has ended"))

    def __repr__(self) -> str:
        return f"<VerbsPeer {self._state.name.lower()}, {self._queue!r}>"


def _containing(
    memories: Iterable[DeviceMemory], address: int, length_bytes: int
) -> DeviceMemory | None:
    """The memory in which a piece lies."""
    for memory in memories:
        if memory.address <= address <= memory.address + memory.length_bytes - length_bytes:
            return memory
    return None
