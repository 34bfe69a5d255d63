"""The log in S3: one object a record, put under its number by `If-None-Match: *`.

What is trimmed is deleted only when a floor above it has been there for `kept_s`. So whoever has
seen the floors less than that ago need not look at them: what was trimmed since is there still, and
refuses the number. Others look, before and after. How long ago that was is by `CLOCK_BOOTTIME`,
which counts the time that a machine sleeps, or by the wall clock where that says it was longer: it
is set right after a pause of a virtual machine that `CLOCK_BOOTTIME` did not see. How long a floor
has been there is by `CLOCK_BOOTTIME` alone, which never runs ahead.

The record before the one that is appended must be there. That is looked at only where this handle
has neither appended nor seen it: whoever follows the log has, so a commit is one request.

A record is stored behind a token that its append alone has: where an answer was lost, it says whose
the record under the number is.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Callable, Generator
from typing import NamedTuple

from obstore.exceptions import AlreadyExistsError

from objectcache_schemas.errors import StorageFull, Unavailable
from objectcache_storage_server.engines.blobs.blob_store import StoreTimeout
from objectcache_storage_server.engines.stores.s3.s3_calls import MaybeOurs, MissingKey
from objectcache_storage_server.engines.stores.s3.s3_objects import S3Objects
from objectcache_storage_server.engines.stores.shared_store import TrimmedLog

KEPT_S = 600.0
TOKEN_BYTES = 16
FLOORS_KEPT = 3
RECORDS_AT_ONCE = 16
LOG, FLOORS = "log", "floor"


def boot_time_s() -> float:
    """Seconds since the machine was started, those that it slept too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class _Moment(NamedTuple):
    """By both clocks."""

    boot_s: float
    wall_s: float


class S3Log:
    """Methods run in the loop of `S3Calls`, and raise as those of `SharedStore`."""

    def __init__(
        self,
        objects: S3Objects,
        kept_s: float = KEPT_S,
        clock: Callable[[], float] = boot_time_s,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._objects = objects
        self._kept_s = kept_s
        self._clock, self._wall_clock = clock, wall_clock
        self._floor = 0
        self._end_seen = 0  # behind the last record that this handle has seen
        self._looked: _Moment | None = None  # what is above the floor was there for `kept_s` after
        self._seen_s: dict[int, float] = {}  # floors: when they were first seen

    async def append(self, number: int, record: bytes, deadline_s: float) -> bool:
        """See `SharedStore.append`."""
        floor = await self.floor(deadline_s)
        if number > max(floor, self._end_seen):
            floor = await self._check_before(number, deadline_s)
        if number < floor:
            return False
        looked = self._looked  # for the floor that this append has seen
        token = uuid.uuid4().bytes
        if not await self._put(number, token + record, deadline_s):
            return False
        self._note_seen(number)
        if not self._is_within(self._kept_s, looked):
            with _may_be_stored(number):
                floor = await self.floor(deadline_s)
            if number < floor:
                raise StoreTimeout(f"record {number} may have been another's: it has been trimmed")
        return True

    async def _check_before(self, number: int, deadline_s: float) -> int:
        """Raise `Unavailable` unless the record before is there, which this handle has not seen: a
        record that the store has lost must not be followed by one. Returns the floor.
        """
        try:
            await self._objects.size_bytes(_record_key(number - 1), deadline_s)
        except MissingKey:
            floor = await self._fresh_floor(deadline_s)
            if number > floor:
                raise Unavailable(
                    f"the log has no record {number - 1} for {number} to follow"
                ) from None
            return floor
        self._note_seen(number - 1)
        return self._floor

    def _note_seen(self, number: int) -> None:
        """There is, or was, this record."""
        self._end_seen = max(self._end_seen, number + 1)

    async def _put(self, number: int, content: bytes, deadline_s: float) -> bool:
        """Whether the number is this record's."""
        key = _record_key(number)
        try:
            await self._objects.put(key, content, deadline_s, create=True)
            return True
        except AlreadyExistsError as error:
            # Of this append too, where an answer was lost; or of one that is not decided yet.
            maybe_ours = isinstance(error, MaybeOurs)
        with _may_be_stored(number):
            return await self._is_ours(number, content, deadline_s, maybe_ours=maybe_ours)

    async def _is_ours(
        self, number: int, content: bytes, deadline_s: float, *, maybe_ours: bool
    ) -> bool:
        """Whether the number, which was said to be taken, is this record's."""
        key = _record_key(number)
        while True:
            try:
                token = await self._objects.get_range(key, 0, TOKEN_BYTES, deadline_s)
                return bytes(token) == content[:TOKEN_BYTES]
            except MissingKey:
                if number < await self._fresh_floor(deadline_s):
                    if not maybe_ours:
                        return False
                    raise StoreTimeout(f"record {number} may have been another's") from None
            await asyncio.sleep(0.02)
            try:
                await self._objects.put(key, content, deadline_s, create=True)
                return True
            except AlreadyExistsError as error:
                maybe_ours |= isinstance(error, MaybeOurs)

    async def read(self, first: int, size_bytes_max: int, deadline_s: float) -> list[bytes]:
        """See `SharedStore.read_log`."""
        floor = await self.floor(deadline_s)
        if first < floor:
            raise TrimmedLog(floor)
        looked = self._looked
        wanted: list[int] = []
        async for number, size_bytes in self._numbers(first, deadline_s):
            if number != first + len(wanted):
                break
            size_bytes_max -= size_bytes - TOKEN_BYTES
            if wanted and size_bytes_max < 0:
                break
            wanted.append(number)
            self._note_seen(number)
        found: list[bytes] = []
        try:
            for begin in range(0, len(wanted), RECORDS_AT_ONCE):
                found += await asyncio.gather(
                    *(self._record(n, deadline_s) for n in wanted[begin : begin + RECORDS_AT_ONCE])
                )
        except MissingKey:
            wanted = []
        if not wanted or not self._is_within(self._kept_s, looked):
            floor = await self._fresh_floor(deadline_s)
            if first < floor:
                raise TrimmedLog(floor)
        return found

    async def _record(self, number: int, deadline_s: float) -> bytes:
        return (await self._objects.get(_record_key(number), deadline_s))[TOKEN_BYTES:]

    async def end(self, known: int, deadline_s: float) -> int:
        """See `SharedStore.log_end`."""
        while True:
            end = first = max(known, await self.floor(deadline_s))
            looked = self._looked
            async for number, _ in self._numbers(first, deadline_s):
                end = number + 1
                self._note_seen(number)
            is_sure = self._is_within(self._kept_s, looked)
            if is_sure or await self._fresh_floor(deadline_s) <= first:
                if end == first:
                    await self._objects.check_there(deadline_s)
                return end

    async def trim(self, first: int, deadline_s: float) -> None:
        """See `SharedStore.trim_log`."""
        floor = await self._fresh_floor(deadline_s)
        if first > floor:
            await self._objects.put(f"{FLOORS}/{first:020d}", b"floor", deadline_s)
            self._seen_s.setdefault(first, self._clock())
        now_s = self._clock()
        old = [number for number, seen_s in self._seen_s.items() if now_s - seen_s >= self._kept_s]
        if old:
            await self._remove_below(max(old), deadline_s)
        # Those below the newest that is old enough say nothing more; three stay for whoever lists.
        spare = sorted(number for number in self._seen_s if number < max(old, default=0))
        await self._objects.delete(
            [f"{FLOORS}/{number:020d}" for number in spare[:-FLOORS_KEPT]], deadline_s
        )

    async def _remove_below(self, floor: int, deadline_s: float) -> None:
        doomed: list[str] = []
        async for number, _ in self._numbers(0, deadline_s):
            if number >= floor:
                break
            doomed.append(_record_key(number))
        await self._objects.delete(doomed, deadline_s)

    async def floor(self, deadline_s: float) -> int:
        """The first record that is kept, as it was less than half of `kept_s` ago."""
        if self._is_within(self._kept_s / 2, self._looked):
            return self._floor
        return await self._fresh_floor(deadline_s)

    async def _fresh_floor(self, deadline_s: float) -> int:
        asked = self._now()
        floors = [int(name) async for name, _ in self._objects.names(f"{FLOORS}/", "", deadline_s)]
        now_s = self._clock()
        self._seen_s = {number: self._seen_s.get(number, now_s) for number in floors}
        self._floor = max([self._floor, *floors])
        self._looked = asked
        return self._floor

    def _now(self) -> _Moment:
        return _Moment(self._clock(), self._wall_clock())

    def _is_within(self, time_s: float, moment: _Moment | None) -> bool:
        """Whether it was less than so long ago, by both clocks."""
        if moment is None:
            return False
        now = self._now()
        return max(now.boot_s - moment.boot_s, now.wall_s - moment.wall_s) < time_s

    async def _numbers(self, first: int, deadline_s: float) -> AsyncIterator[tuple[int, int]]:
        """Records from `first` on, in order, with the bytes they are stored in."""
        after = f"{first - 1:020d}" if first else ""
        async for name, size_bytes in self._objects.names(f"{LOG}/", after, deadline_s):
            yield int(name), size_bytes


@contextlib.contextmanager
def _may_be_stored(number: int) -> Generator[None, None, None]:
    """What goes wrong in it says nothing of a record that was put before."""
    try:
        yield
    except StoreTimeout:
        raise
    except (StorageFull, Unavailable) as error:
        raise StoreTimeout(f"record {number} may have been stored: {error}") from error


def _record_key(number: int) -> str:
    return f"{LOG}/{number:020d}"
