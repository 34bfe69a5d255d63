"""What stands in for the calls of libdaos where no DAOS is, for answers that a real one does not
give on demand. It keeps keys and values in memory and answers in order. It says nothing of whether
a real DAOS is called in the right way: the contract suite does, where there is one.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from objectcache_storage_server.engines.stores.daos.libdaos import (
    ANCHOR_END,
    ARRAY,
    EXISTS,
    INSERT_KEY,
    OK,
    RESTART,
    TOO_BIG,
    Anchor,
    Buffer,
    BufferList,
    Event,
    KeyDescription,
    Libdaos,
    Value,
)

INVALID = -1003
Key = tuple[int, bytes]  # object and distribution key
Values = dict[bytes, bytes]


@dataclass
class Container:
    """What several handles share."""

    keys: dict[Key, Values] = field(default_factory=dict)
    versions: dict[Key, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def write(self, key: Key, values: Values) -> None:
        self.keys.setdefault(key, {}).update(values)
        self.versions[key] = self.versions.get(key, 0) + 1


@dataclass
class Transaction:
    read: dict[Key, int] = field(default_factory=dict)
    written: list[tuple[Key, Values, int]] = field(default_factory=list)
    under_way: int = 0  # calls that have not ended


class DaosStandIn(Libdaos):
    """`answers` has, by the name of a call, what is answered next instead of carrying it out;
    `held` are calls by name whose events do not end until `release`. `has_aborted`: libdaos would
    have ended the process.
    """

    has_aborted = False

    def __init__(self, container: Container) -> None:
        self.container = container
        self.answers: dict[str, deque[int]] = {}
        self.held: set[str] = set()
        self._numbers = itertools.count(1)
        self._objects: dict[int, int] = {}
        self._transactions: dict[int, Transaction] = {}
        self._ended: deque[int] = deque()
        self._late: list[Any] = []

    def release(self) -> None:
        """Carry out what was held."""
        self.held.clear()
        late, self._late = self._late, []
        for action in late:
            action()

    def held_count(self) -> int:
        """Calls that have not ended."""
        return len(self._late)

    def transaction_count(self) -> int:
        """Those that have not been closed."""
        return len(self._transactions)

    def _answer(self, name: str, event: Any, action: Any = lambda: OK, transaction: int = 0) -> int:
        if event is None:
            return int(action())
        of = self._transactions.get(transaction, Transaction())
        of.under_way += 1

        def end() -> None:
            of.under_way -= 1
            planned = self.answers.get(name)
            code = planned.popleft() if planned else action()
            Event.from_address(event).error = code
            self._ended.append(event)

        if name in self.held:
            self._late.append(end)
        else:
            end()
        return OK

    # --- the library, queues, handles ---

    def init(self) -> int:
        return OK

    fini = event_fini = lambda self, *_: OK

    def event_init(self, *_: Any) -> int:
        return OK

    eq_destroy = pool_disconnect = cont_close = event_init

    def eq_create(self, handle: Any) -> int:
        return self._new(handle)

    def eq_poll(self, _queue: Any, _wait: int, timeout_us: int, count: int, events: Any) -> int:
        if not self._ended:
            time.sleep(timeout_us / 1e6)
        found = 0
        while self._ended and found < count:
            events[found] = ctypes.pointer(Event.from_address(self._ended.popleft()))
            found += 1
        return found

    def _new(self, handle: Any) -> int:
        handle._obj.value = next(self._numbers)
        return OK

    def pool_connect2(
        self, _pool: Any, _sys: Any, _flags: int, handle: Any, _: Any, ev: Any
    ) -> int:
        return self._answer("pool_connect2", ev, lambda: self._new(handle))

    def cont_open2(self, _pool: Any, _name: Any, _flags: int, handle: Any, _: Any, ev: Any) -> int:
        return self._answer("cont_open2", ev, lambda: self._new(handle))

    def obj_generate_oid2(self, *_: Any) -> int:
        return OK

    def obj_open(self, _cont: Any, name: Any, _mode: int, handle: Any, ev: Any) -> int:
        def open_it() -> int:
            self._new(handle)
            self._objects[handle._obj.value] = name.low
            return OK

        return self._answer("obj_open", ev, open_it)

    # --- transactions ---

    def tx_open(self, _cont: Any, handle: Any, _flags: int, ev: Any) -> int:
        def open_it() -> int:
            self._new(handle)
            self._transactions[handle._obj.value] = Transaction()
            return OK

        return self._answer("tx_open", ev, open_it)

    def tx_commit(self, handle: Any, ev: Any) -> int:
        def commit() -> int:
            transaction = self._transactions[handle.value]
            with self.container.lock:
                for key, version in transaction.read.items():
                    if self.container.versions.get(key, 0) != version:
                        return RESTART
                for key, _, conditions in transaction.written:
                    if conditions & INSERT_KEY and self.container.keys.get(key):
                        return EXISTS
                for key, values, _ in transaction.written:
                    self.container.write(key, values)
            return OK

        return self._answer("tx_commit", ev, commit, handle.value)

    def tx_close(self, handle: Any, ev: Any) -> int:
        self.has_aborted |= self._transactions.pop(handle.value).under_way > 0
        return self._answer("tx_close", ev)

    # --- keys and values ---

    def obj_fetch(
        self, handle: Any, th: Any, _flags: int, key: int, count: int, values: Any, lists: Any,
        _maps: Any, ev: Any,
    ) -> int:  # fmt: skip
        if any(overlap(values[i]) for i in range(count)):
            return INVALID

        def fetch() -> int:
            place = self._place(handle, key)
            with self.container.lock:
                if th.value:
                    read = self._transactions[th.value].read
                    read[place] = self.container.versions.get(place, 0)
                found = self.container.keys.get(place, {})
                codes = [
                    read_value(found.get(bytes_of(values[i].key)), values[i], lists and lists[i])
                    for i in range(count)
                ]
            return min(codes)

        return self._answer("obj_fetch", ev, fetch, th.value)

    def obj_update(
        self, handle: Any, th: Any, conditions: int, key: int, count: int, values: Any, lists: Any,
        ev: Any,
    ) -> int:  # fmt: skip
        def update() -> int:
            place = self._place(handle, key)
            new = {bytes_of(values[i].key): bytes_of(lists[i].buffers[0]) for i in range(count)}
            if th.value:
                self._transactions[th.value].written.append((place, new, conditions))
                return OK
            with self.container.lock:
                if conditions & INSERT_KEY and self.container.keys.get(place):
                    return EXISTS
                self.container.write(place, new)
            return OK

        return self._answer("obj_update", ev, update, th.value)

    def obj_punch_dkeys(
        self, handle: Any, _th: Any, _flags: int, _count: int, key: int, ev: Any
    ) -> int:
        def punch() -> int:
            with self.container.lock:
                self.container.keys.pop(self._place(handle, key), None)
            return OK

        return self._answer("obj_punch_dkeys", ev, punch)

    def obj_list_dkey(
        self, handle: Any, _th: Any, count: Any, keys: Any, lists: int, anchor: int, ev: Any
    ) -> int:
        def page() -> int:
            at = Anchor.from_address(anchor)
            number = self._objects[handle.value]
            with self.container.lock:
                names = sorted(key for of, key in self.container.keys if of == number)
            some = names[at.sub_anchors : at.sub_anchors + count._obj.value]
            buffer = BufferList.from_address(lists).buffers[0]
            ctypes.memmove(buffer.address, b"".join(some), sum(map(len, some)))
            for index, name in enumerate(some):
                keys[index] = KeyDescription(len(name), 0)
            count._obj.value = len(some)
            at.sub_anchors += len(some)
            at.kind = ANCHOR_END if at.sub_anchors >= len(names) else 1
            return OK

        return self._answer("obj_list_dkey", ev, page)

    def _place(self, handle: Any, key: int) -> Key:
        return self._objects[handle.value], bytes_of(Buffer.from_address(key))


def bytes_of(buffer: Any) -> bytes:
    return ctypes.string_at(buffer.address, buffer.size_bytes)


def overlap(value: Any) -> bool:
    """Whether two extents of a value have a byte in common."""
    if value.kind != ARRAY:
        return False
    extents = sorted((each.first, each.count) for each in value.extents[: value.extent_count])
    return any(
        first + size > following for (first, size), (following, _) in itertools.pairwise(extents)
    )


def read_value(found: bytes | None, value: Any, of_value: Any) -> int:
    """Fill a value's buffer, as far as it goes."""
    assert isinstance(value, Value)
    if found is None:
        value.record_bytes = 0
        return OK
    if value.kind == ARRAY:
        extents = [value.extents[i] for i in range(value.extent_count)]
        data = b"".join(
            found[each.first : each.first + each.count].ljust(each.count, b"\0") for each in extents
        )
    else:
        data, value.record_bytes = found, len(found)
    if of_value:
        buffer = of_value.buffers[0]
        if len(data) > buffer.size_bytes:
            return TOO_BIG
        ctypes.memmove(buffer.address, data, len(data))
    return OK
