"""The log in DAOS: an object whose keys are numbers. Record n lies at key n + 1.

An append is a transaction: it reads the floor and inserts the key, on the condition that it is not
there. A trim raises the floor in another, and then removes the keys below it. The two contradict
each other where they overlap, and one is told to restart; so a server that slept while its number
was used and trimmed finds the floor above it, or the key.

Key 0 has two values, the floor and `swept`: the keys below that are removed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from ctypes import c_uint64

from objectcache_schemas.errors import DamagedData, Unavailable
from objectcache_schemas.limits import KIB
from objectcache_storage_server.engines.stores.daos.daos_access import (
    KeyAccess,
    KeyFetch,
    KeyPart,
    begin_fetch,
)
from objectcache_storage_server.engines.stores.daos.daos_client import DaosClient, Transaction
from objectcache_storage_server.engines.stores.daos.libdaos import (
    EXISTS,
    INSERT_KEY,
    OK,
    ONE_GROUP,
    REFUSALS,
    RESTART,
    TOO_BIG,
    UINT64_KEYS,
    check,
)
from objectcache_storage_server.engines.stores.shared_store import StoreTimeout, TrimmedLog
from objectcache_storage_server.engines.stores.store_calls import check_deadline

RECORDS_AHEAD = 16  # asked for at a time
GUESSED_BYTES = 16 * KIB  # of a record; a larger one is asked for again
REMOVALS_MAX = 64  # under way at a time
RESTART_WAIT_S = 0.001
_RECORD, _FLOOR, _SWEPT = b"record", b"floor", b"swept"
_NUMBER_BYTES = 8


def key_of(number: int) -> bytes:
    """The key of a record. Integer keys are in the order of bytes of the machine."""
    return c_uint64(number + 1).value.to_bytes(_NUMBER_BYTES, "little")


MARKS_KEY = key_of(-1)


class DaosLog:
    """Appending, reading and trimming. Threads may do all of it at once."""

    def __init__(self, client: DaosClient, number: int, deadline_s: float, *, create: bool) -> None:
        """In the DAOS object of this number. `create` makes an empty log where there is none.

        Raises `Unavailable`.
        """
        self._client = client
        self._object = client.open_object(number, UINT64_KEYS, ONE_GROUP, deadline_s)
        self.was_made = False
        if create:
            marks = KeyAccess(MARKS_KEY, number_part(_FLOOR, 0), number_part(_SWEPT, 0))
            code = client.call(
                "make the log", deadline_s, marks.update(client, self._object, INSERT_KEY)
            )
            if code != EXISTS:
                check(code, "make the log")
                self.was_made = True
        self._mark(_FLOOR, deadline_s)

    def append(self, number: int, record: bytes, deadline_s: float) -> bool:
        """See `SharedStore.append`."""
        what = f"append record {number}"

        def insert(transaction: Transaction) -> int:
            try:
                floor = self._mark(_FLOOR, deadline_s, transaction)
                if number < floor:
                    return EXISTS
                if number > floor and not self.has(number - 1, deadline_s, transaction):
                    raise Unavailable(f"the log has no record {number - 1} for {number} to follow")
                access = KeyAccess(key_of(number), KeyPart(_RECORD, memoryview(record)))
                change = access.update(
                    self._client, self._object, INSERT_KEY, transaction.transaction
                )
                return transaction.call(what, deadline_s, change)
            except StoreTimeout as error:
                raise Unavailable(f"record {number} of the log was not begun: {error}") from error

        code = self._in_transaction(what, deadline_s, insert)
        if code == EXISTS:
            return False
        if code != OK and code not in REFUSALS:
            raise StoreTimeout(f"record {number} of the log may have been stored: answer {code}")
        check(code, what)
        return True

    def has(self, number: int, deadline_s: float, transaction: Transaction | None = None) -> bool:
        """Whether there is a record of this number."""
        return self._size_bytes(number, deadline_s, transaction) > 0

    def end(self, known: int, deadline_s: float) -> int:
        """The number of the next record. Numbers have no gap, so it is found by halving."""
        low = max(known, self._mark(_FLOOR, deadline_s))  # the end is not below
        step = 1
        while self.has(low + step - 1, deadline_s):
            low, step = low + step, step * 2
        high = low + step - 1  # there is no record of this number
        while low < high:
            middle = (low + high) // 2
            if self.has(middle, deadline_s):
                low = middle + 1
            else:
                high = middle
        return low

    def read(self, first: int, size_bytes_max: int, deadline_s: float) -> list[bytes]:
        """See `SharedStore.read_log`."""
        records: list[bytes] = []
        under_way: deque[tuple[KeyFetch, bytearray]] = deque()
        ahead = first
        while True:
            while len(under_way) < RECORDS_AHEAD:
                under_way.append(self._begin_record(ahead, GUESSED_BYTES))
                ahead += 1
            record = self._record(first + len(records), *under_way.popleft(), deadline_s)
            if record is None:
                break
            size_bytes_max -= len(record)
            if records and size_bytes_max < 0:
                break
            records.append(record)
        for fetch, _ in under_way:
            fetch.future.cancel()
        if not records:
            floor = self._mark(_FLOOR, deadline_s)
            if floor > first:
                raise TrimmedLog(floor)
        return records

    def trim(self, first: int, deadline_s: float) -> None:
        """See `SharedStore.trim_log`."""
        floor = min(first, self.end(0, deadline_s))

        def raise_floor(transaction: Transaction) -> int:
            if self._mark(_FLOOR, deadline_s, transaction) >= floor:
                return OK
            change = KeyAccess(MARKS_KEY, number_part(_FLOOR, floor))
            return transaction.call(
                "trim the log",
                deadline_s,
                change.update(self._client, self._object, transaction=transaction.transaction),
            )

        check(self._in_transaction("trim the log", deadline_s, raise_floor), "trim the log")
        swept = self._mark(_SWEPT, deadline_s)
        if swept >= floor:
            return
        self._remove(swept, floor, deadline_s)
        done = KeyAccess(MARKS_KEY, number_part(_SWEPT, floor))
        self._client.call("trim the log", deadline_s, done.update(self._client, self._object))

    # --- parts ---

    def _in_transaction(
        self, what: str, deadline_s: float, change: Callable[[Transaction], int]
    ) -> int:
        """Make a change and commit it, again where another came in between; the answer."""
        while True:
            check_deadline(deadline_s, what)
            transaction = self._client.open_transaction(deadline_s)
            try:
                code = change(transaction)
                if code == OK:
                    code = transaction.commit(what, deadline_s)
            except RestartedTransaction:
                code = RESTART
            finally:
                transaction.close()
            if code != RESTART:
                return code
            time.sleep(RESTART_WAIT_S)

    def _mark(self, name: bytes, deadline_s: float, transaction: Transaction | None = None) -> int:
        """A mark of the log. Raises `Unavailable` where there is none: this is no store."""
        value = bytearray(_NUMBER_BYTES)
        access = KeyAccess(MARKS_KEY, KeyPart(name, memoryview(value)))
        self._fetch("look at the log", access, deadline_s, transaction)
        if access.size_bytes(0) != _NUMBER_BYTES:
            raise Unavailable(f"there is no store in container {self._client.container}")
        return int.from_bytes(value, "little")

    def _size_bytes(
        self, number: int, deadline_s: float, transaction: Transaction | None = None
    ) -> int:
        access = KeyAccess(key_of(number), KeyPart(_RECORD, None))
        self._fetch(f"look for record {number}", access, deadline_s, transaction)
        return access.size_bytes(0)

    def _fetch(
        self, what: str, access: KeyAccess, deadline_s: float, transaction: Transaction | None
    ) -> None:
        by = transaction or self._client
        call = access.fetch(self._client, self._object, by.transaction)
        code = by.call(what, deadline_s, call)
        if code == RESTART:
            raise RestartedTransaction
        check(code, what)

    def _begin_record(self, number: int, size_bytes: int) -> tuple[KeyFetch, bytearray]:
        data = bytearray(size_bytes)
        access = KeyAccess(key_of(number), KeyPart(_RECORD, memoryview(data)))
        return begin_fetch(self._client, self._object, access), data

    def _record(
        self, number: int, fetch: KeyFetch, data: bytearray, deadline_s: float
    ) -> bytes | None:
        what = f"read record {number}"
        code = self._client.answer(fetch.future, what, deadline_s)
        if code == TOO_BIG:
            fetch, data = self._begin_record(number, self._size_bytes(number, deadline_s))
            code = self._client.answer(fetch.future, what, deadline_s)
        check(code, what)
        size_bytes = fetch.access.size_bytes(0)
        if size_bytes > len(data):
            raise DamagedData(f"record {number} of the log has changed while it was read")
        return bytes(data[:size_bytes]) if size_bytes else None

    def _remove(self, first: int, last: int, deadline_s: float) -> None:
        """Remove the keys of records from `first` to before `last`."""
        what = "trim the log"
        under_way: deque[KeyFetch] = deque()
        for number in range(first, last):
            access = KeyAccess(key_of(number))
            call = access.remove(self._client, self._object)
            under_way.append(KeyFetch(access, self._client.begin(call)))
            if len(under_way) == REMOVALS_MAX:
                check(self._client.answer(under_way.popleft().future, what, deadline_s), what)
        for fetch in under_way:
            check(self._client.answer(fetch.future, what, deadline_s), what)


class RestartedTransaction(Exception):
    """A read in a transaction was told that it must be made again."""


def number_part(name: bytes, number: int) -> KeyPart:
    """A number as a value."""
    return KeyPart(name, memoryview(number.to_bytes(_NUMBER_BYTES, "little")))
