"""Shared stores that pass every call on to another one, and fail as networks and devices do."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from objectcache_schemas.errors import StorageFull, Unavailable
from objectcache_storage_server.engines.passing_engine import passed_on
from objectcache_storage_server.engines.stores.shared_store import (
    LostObject,
    ObjectRead,
    SharedStore,
    StoredObject,
    StoreTimeout,
)

T = TypeVar("T")

READ_THREADS = 16
_CHANGES = frozenset({"put", "delete", "append", "trim_log"})


class PassingStore(SharedStore):
    """A store that behaves as `inner` does; owns it, and closes it."""

    def __init__(self, inner: SharedStore) -> None:
        self.inner = inner
        self.capabilities = inner.capabilities
        self.was_made = inner.was_made

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.inner!r}>"

    def call(self, operation: str, size_bytes: int, action: Callable[[], T]) -> T:
        """Carry out one operation of the contract, by its method's name."""
        return action()

    put = passed_on(SharedStore.put)
    put_from_reserve = passed_on(SharedStore.put_from_reserve)
    is_short = passed_on(SharedStore.is_short)
    begin_reads = passed_on(SharedStore.begin_reads)
    get = passed_on(SharedStore.get)
    list_objects = passed_on(SharedStore.list_objects)
    delete = passed_on(SharedStore.delete)
    append = passed_on(SharedStore.append)
    read_log = passed_on(SharedStore.read_log)
    log_end = passed_on(SharedStore.log_end)
    trim_log = passed_on(SharedStore.trim_log)
    wait_for_record = passed_on(SharedStore.wait_for_record)
    end_waits = passed_on(SharedStore.end_waits)
    close = passed_on(SharedStore.close)


class FaultyStore(PassingStore):
    """One server's way to a store, with the faults that a test asks for.

    `delay_s`: every call waits so long before it is carried out; a deadline that is sooner ends it
    with `StoreTimeout`, not carried out. `is_full`: puts are refused, with `records_are_refused`
    appends too. `fault_rate`: calls fail with this probability, the same for one seed and one
    order of calls: `StoreTimeout` after they were carried out, or `Unavailable` before.
    `calls` counts them by the method's name.
    """

    def __init__(self, inner: SharedStore, seed: int = 0) -> None:
        super().__init__(inner)
        self.delay_s = 0.0
        self.is_full = False
        self.records_are_refused = False
        self.fault_rate = 0.0
        self.calls: Counter[str] = Counter()
        self._seed = seed
        self._random = random.Random(seed)  # noqa: S311  repeatable faults, not secrets
        self._changed = threading.Condition()
        self._is_held = False
        self._is_closed = False
        self._waits_round = 0  # grows when waits are ended
        self._are_late_calls_kept = False
        self._late: list[Callable[[], object]] = []
        self._timeouts: dict[str, list[bool]] = {}  # by operation: is the next one carried out
        self._lost: set[str] = set()
        self._flips: dict[str, list[tuple[int, int]]] = {}  # by object: byte, reads that are left
        self._record_flips: set[int] = set()
        self._readers = ThreadPoolExecutor(READ_THREADS, "faulty-reads")

    # --- what a test asks for ---

    def time_out(self, operation: str, *, is_carried_out: bool, count: int = 1) -> None:
        """The next `count` calls of a method time out, after they were carried out or instead."""
        with self._changed:
            self._timeouts.setdefault(operation, []).extend([is_carried_out] * count)

    def hold(self, *, keep_late_calls: bool = False) -> None:
        """From now on calls wait for `release`, as in a partition, or time out at their deadline.
        With `keep_late_calls` puts, appends and deletes that timed out are carried out by
        `release`, as what was on its way may be.
        """
        with self._changed:
            self._is_held = True
            self._are_late_calls_kept = keep_late_calls

    def release(self) -> None:
        """Calls go through again. What was kept is carried out first, in order."""
        with self._changed:
            late, self._late = self._late, []
        for carry_out in late:
            with contextlib.suppress(Unavailable):  # nobody waits for it
                carry_out()
        with self._changed:
            self._is_held = False
            self._changed.notify_all()

    def lose(self, *names: str) -> None:
        """Objects are not there any more, for this handle."""
        with self._changed:
            self._lost.update(names)

    def flip(self, name: str, byte: int, *, read_count: int = 1 << 30) -> None:
        """The lowest bit of a byte of an object is the other one, in its next `read_count` reads of
        that byte.
        """
        with self._changed:
            self._flips.setdefault(name, []).append((byte, read_count))

    def flip_record(self, number: int) -> None:
        """The lowest bit of a record's last byte is the other one in every read."""
        with self._changed:
            self._record_flips.add(number)

    def heal(self) -> None:
        """Time-outs and flips that were asked for and are not due yet will not be."""
        with self._changed:
            self._timeouts.clear()
            self._flips.clear()

    # --- the contract ---

    def put(self, name: str, parts: Sequence[memoryview], deadline_s: float) -> None:
        kept = [memoryview(bytes(part)) for part in parts]  # a late call reads them later
        self._carry_out("put", deadline_s, lambda s: self.inner.put(name, kept, s))

    def put_from_reserve(self, name: str, parts: Sequence[memoryview], deadline_s: float) -> None:
        kept = [memoryview(bytes(part)) for part in parts]
        self._carry_out("put", deadline_s, lambda s: self.inner.put_from_reserve(name, kept, s))

    def begin_reads(self, reads: Sequence[ObjectRead], deadline_s: float) -> Future[None]:
        def carry_out() -> None:
            self._carry_out("begin_reads", deadline_s, lambda s: self._read(reads, s))

        return self._readers.submit(carry_out)

    def get(self, name: str, deadline_s: float) -> bytes:
        def get(deadline_s: float) -> bytes:
            self._check_lost(name)
            data = bytearray(self.inner.get(name, deadline_s))
            self._flip_in(ObjectRead(name, 0, memoryview(data)))
            return bytes(data)

        return self._carry_out("get", deadline_s, get)

    def list_objects(self, prefix: str, deadline_s: float) -> Iterator[StoredObject]:
        found = self._carry_out(
            "list_objects", deadline_s, lambda s: list(self.inner.list_objects(prefix, s))
        )
        return (stored for stored in found if stored.name not in self._lost)

    def delete(self, names: Iterable[str], deadline_s: float) -> None:
        kept = list(names)
        self._carry_out("delete", deadline_s, lambda s: self.inner.delete(kept, s))

    def append(self, number: int, record: bytes, deadline_s: float) -> bool:
        return self._carry_out("append", deadline_s, lambda s: self.inner.append(number, record, s))

    def read_log(self, first: int, size_bytes_max: int, deadline_s: float) -> list[bytes]:
        found = self._carry_out(
            "read_log", deadline_s, lambda s: self.inner.read_log(first, size_bytes_max, s)
        )
        return [
            record[:-1] + bytes([record[-1] ^ 1]) if number in self._record_flips else record
            for number, record in enumerate(found, first)
        ]

    def log_end(self, known: int, deadline_s: float) -> int:
        return self._carry_out("log_end", deadline_s, lambda s: self.inner.log_end(known, s))

    def trim_log(self, first: int, deadline_s: float) -> None:
        self._carry_out("trim_log", deadline_s, lambda s: self.inner.trim_log(first, s))

    def wait_for_record(self, number: int, timeout_s: float) -> None:
        """A bell does not ring through a partition."""
        end_s = time.monotonic() + timeout_s
        with self._changed:
            self.calls["wait_for_record"] += 1
            begun_in = self._waits_round
            self._changed.wait_for(
                lambda: not self._is_held or self._is_closed or self._waits_round != begun_in,
                timeout_s,
            )
            if self._waits_round != begun_in:
                return
        self.inner.wait_for_record(number, max(end_s - time.monotonic(), 0.0))

    def end_waits(self) -> None:
        with self._changed:
            self._waits_round += 1
            self._changed.notify_all()
        self.inner.end_waits()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self.inner.close()  # wakes who waits there
        self._readers.shutdown()

    # --- faults ---

    def _carry_out(self, operation: str, deadline_s: float, action: Callable[[float], T]) -> T:
        """`action`, which takes its deadline, with the faults that are due."""
        with self._changed:
            self.calls[operation] += 1
            self._pass_gate(operation, deadline_s, action)
            told = f"injected into {operation}: seed {self._seed}, call {self.calls[operation]}"
            before, after = self._due_faults(operation, told)
        if before is not None:
            raise before
        refused = operation == "put" or (operation == "append" and self.records_are_refused)
        if self.is_full and refused:
            raise StorageFull(told)
        result = action(deadline_s)
        if after is not None:
            raise after
        return result

    def _due_faults(
        self, operation: str, told: str
    ) -> tuple[Unavailable | None, Unavailable | None]:
        """The error to raise in place of a call, and the one to raise after it."""
        if planned := self._timeouts.get(operation):
            timeout = StoreTimeout(told)
            return (None, timeout) if planned.pop(0) else (timeout, None)
        if self.fault_rate and self._random.random() < self.fault_rate:
            if self._random.random() < 0.5:
                return None, StoreTimeout(told)
            return Unavailable(told), None
        return None, None

    def _pass_gate(
        self, operation: str, deadline_s: float, action: Callable[[float], object]
    ) -> None:
        """Wait for the delay and for `release`. Raises `StoreTimeout` at the deadline."""
        due_s = time.monotonic() + self.delay_s
        while not self._is_closed:
            now_s = time.monotonic()
            if now_s >= due_s and not self._is_held:
                return
            if now_s >= deadline_s:
                if self._is_held and self._are_late_calls_kept and operation in _CHANGES:
                    self._late.append(lambda: action(float("inf")))
                raise StoreTimeout(f"{operation}: the store did not answer in time")
            wait_s = deadline_s if self._is_held else min(deadline_s, due_s)
            self._changed.wait(min(wait_s - now_s, threading.TIMEOUT_MAX))

    def _read(self, reads: Sequence[ObjectRead], deadline_s: float) -> None:
        for read in reads:
            self._check_lost(read.name)
        self.inner.begin_reads(reads, deadline_s).result()
        for read in reads:
            self._flip_in(read)

    def _check_lost(self, name: str) -> None:
        if name in self._lost:
            raise LostObject(name, "it is not there: injected")

    def _flip_in(self, read: ObjectRead) -> None:
        with self._changed:
            flips = self._flips.get(read.name, [])
            for at, (byte, left) in enumerate(flips):
                within = byte - read.offset_bytes
                if left > 0 and 0 <= within < read.landing.nbytes:
                    flips[at] = (byte, left - 1)
                    read.landing[within] ^= 1
