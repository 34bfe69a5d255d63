"""Operations under way: begun at once, waited for by any thread, given up at their deadlines."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from typing import NamedTuple

from objectcache_storage_server.engines.stores.rados.librados import (
    CANCELLED,
    FAILED,
    FULL_TRY,
    OK,
    Librados,
    RadosPool,
    WriteOperation,
    address_of,
)
from objectcache_storage_server.engines.stores.shared_store import LostObject, StoreTimeout

REMOVALS_MAX = 64  # under way at a time, of one call
TICK_S = 0.2  # how late a deadline may be seen
_SIZE_BYTES, _CODE_BYTES = ctypes.sizeof(c_size_t), ctypes.sizeof(c_int)


class Range(NamedTuple):
    """Bytes of an object, and the memory that they are to fill."""

    offset_bytes: int
    size_bytes: int
    address: int
    landing: memoryview  # or the first of several that follow each other in memory

    @staticmethod
    def into(landing: memoryview, offset_bytes: int) -> Range:
        """What fills a landing."""
        return Range(offset_bytes, landing.nbytes, address_of(landing), landing)

    def is_before(self, other: Range) -> bool:
        """Whether the other continues this one, in the object and in memory."""
        return (self.offset_bytes + self.size_bytes, self.address + self.size_bytes) == (
            other.offset_bytes,
            other.address,
        )


class Answer:
    """What an operation comes to. Somebody must `wait` for it, once."""

    def __init__(self, deadlines: Deadlines, pool: RadosPool, name: str, deadline_s: float) -> None:
        self.pool, self.name, self.deadline_s = pool, name, deadline_s
        self.is_given_up = False
        self._calls, self._deadlines = deadlines.calls, deadlines
        self.completion = c_void_p()
        made = self._calls.quick.aio_create_completion2(None, None, byref(self.completion))
        assert made == OK, made

    def begun(self, code: int) -> None:
        """The operation was submitted, or was not. Raises the error that a refusal means."""
        if code != OK:
            self._calls.quick.aio_release(self.completion)
            self.pool.check(code, self.name)
        self._deadlines.add(self)

    def wait(self) -> int:
        """The library's answer; `CANCELLED` with `is_given_up` where there was none in time."""
        quick = self._calls.quick
        if not quick.aio_is_complete(self.completion):
            self._calls.waiting.aio_wait_for_complete(self.completion)
        code: int = quick.aio_get_return_value(self.completion)
        self._deadlines.remove(self)
        quick.aio_release(self.completion)
        return code

    def give_up(self) -> None:
        """Have `wait` return now. It may have been answered just before."""
        self.is_given_up = True
        self._calls.quick.aio_cancel(self.pool.handle, self.completion)


class ReadAnswer(Answer):
    """Of a read of ranges of one object. It keeps the landings until then."""

    def __init__(
        self,
        deadlines: Deadlines,
        pool: RadosPool,
        name: str,
        ranges: Sequence[Range],
        deadline_s: float,
        *,
        with_attributes: bool = False,
    ) -> None:
        super().__init__(deadlines, pool, name, deadline_s)
        quick, count = self._calls.quick, len(ranges)
        self._ranges = ranges
        self.size_bytes = sum(each.size_bytes for each in ranges)
        self.attributes: dict[bytes, bytes] = {}  # of the object, after `end`
        # Where results go: written until the operation is complete.
        self._sizes, self._codes = (c_size_t * count)(), (c_int * count)()
        self._attributes, self._attributes_code = c_void_p(), c_int()
        steps = c_void_p(quick.create_read_op())
        try:
            if with_attributes:
                quick.read_op_getxattrs(
                    steps, byref(self._attributes), ctypes.addressof(self._attributes_code)
                )
            sizes, codes = ctypes.addressof(self._sizes), ctypes.addressof(self._codes)
            for offset_bytes, size_bytes, address, _ in ranges:
                quick.read_op_read(steps, offset_bytes, size_bytes, address, sizes, codes)
                sizes, codes = sizes + _SIZE_BYTES, codes + _CODE_BYTES
            self.begun(
                quick.aio_read_op_operate(steps, pool.handle, self.completion, name.encode(), 0)
            )
        finally:
            quick.release_read_op(steps)

    def end(self) -> list[int]:
        """Wait; how many bytes each range has got. Raises the error that the answer means."""
        code = self.wait()
        if self._attributes:
            self.attributes.update(taken_attributes(self._calls, self._attributes))
        for found in (code, *self._codes):
            self.pool.check(found, self.name)
        return list(self._sizes)

    def end_filled(self) -> None:
        """Wait until every landing is filled; an object that is shorter is lost, too."""
        for found_bytes, wanted in zip(self.end(), self._ranges, strict=True):
            if found_bytes < wanted.size_bytes:
                end_bytes = wanted.offset_bytes + found_bytes
                raise LostObject(self.name, f"it ends at {end_bytes} bytes or before")


def taken_attributes(calls: Librados, iterator: c_void_p) -> Iterator[tuple[bytes, bytes]]:
    """The attributes that a read has found, which are then released."""
    name, value, size_bytes = c_char_p(), c_void_p(), c_size_t()
    while (
        calls.quick.getxattrs_next(iterator, byref(name), byref(value), byref(size_bytes)) == OK
        and name.value is not None
    ):
        yield name.value, ctypes.string_at(value, size_bytes.value)
    calls.quick.getxattrs_end(iterator)


class SizeAnswer(Answer):
    """Of the question how large an object is."""

    def __init__(self, deadlines: Deadlines, pool: RadosPool, name: str, deadline_s: float) -> None:
        super().__init__(deadlines, pool, name, deadline_s)
        quick = self._calls.quick
        self._size, self._code = ctypes.c_uint64(), c_int()
        steps = c_void_p(quick.create_read_op())
        try:
            quick.read_op_stat(
                steps, ctypes.addressof(self._size), None, ctypes.addressof(self._code)
            )
            self.begun(
                quick.aio_read_op_operate(steps, pool.handle, self.completion, name.encode(), 0)
            )
        finally:
            quick.release_read_op(steps)

    def end(self) -> int:
        """Wait; the object's bytes. Raises the error that the answer means."""
        self.pool.check(self.wait(), self.name)
        self.pool.check(self._code.value, self.name)
        return self._size.value


class WriteAnswer(Answer):
    """Of a write, which was built before."""

    def __init__(
        self,
        deadlines: Deadlines,
        pool: RadosPool,
        name: str,
        steps: WriteOperation,
        deadline_s: float,
    ) -> None:
        super().__init__(deadlines, pool, name, deadline_s)
        self.begun(
            self._calls.quick.aio_write_op_operate(
                steps.handle, pool.handle, self.completion, name.encode(), None, FULL_TRY
            )
        )

    def end(self, *expected: int) -> int:
        """Wait; the answer, where it is well or among `expected`. Raises what another means."""
        code = self.wait()
        if code == FAILED:  # of a read it says that bytes are lost, of a write nothing
            raise StoreTimeout(f"{self.name}: an OSD failed while it wrote; it may have been done")
        if code not in expected or (self.is_given_up and code == CANCELLED):
            self.pool.check(code, self.name)
        return code

    def end_removed(self) -> None:
        """Wait until the object is gone, which it may have been before."""
        with suppress(LostObject):
            self.end()


def remove_objects(
    deadlines: Deadlines, pool: RadosPool, names: Iterable[str], deadline_s: float
) -> None:
    """Remove objects that may be gone already, `REMOVALS_MAX` at a time."""
    under_way: deque[WriteAnswer] = deque()
    with ExitStack() as answered:
        # Whatever is raised, all that is under way is waited for.
        answered.callback(lambda: [answer.wait() for answer in under_way])
        for name in names:
            if len(under_way) == REMOVALS_MAX:
                under_way.popleft().end_removed()
            with WriteOperation(pool.calls) as steps:
                steps.remove()
                under_way.append(WriteAnswer(deadlines, pool, name, steps, deadline_s))
        while under_way:
            under_way.popleft().end_removed()


class Deadlines:
    """The thread that gives up what was not answered in time."""

    def __init__(self, calls: Librados) -> None:
        self.calls = calls
        self._lock = threading.Lock()
        self._under_way: set[Answer] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rados-deadlines", daemon=True)
        self._thread.start()

    def add(self, answer: Answer) -> None:
        with self._lock:
            self._under_way.add(answer)

    def remove(self, answer: Answer) -> None:
        """Its completion is about to be released."""
        with self._lock:
            self._under_way.remove(answer)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(TICK_S):
            now_s = time.monotonic()
            with self._lock:
                for answer in self._under_way:
                    if answer.deadline_s <= now_s and not answer.is_given_up:
                        answer.give_up()
