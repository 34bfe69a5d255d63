"""A container of DAOS that is open, and the thread that makes all calls on it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from ctypes import POINTER, addressof, byref, c_uint64
from functools import partial

from objectcache_schemas.errors import Unavailable
from objectcache_storage_server.engines.stores.daos.libdaos import (
    CONTAINER_READ_WRITE,
    NO_TRANSACTION,
    OBJECT_READ_WRITE,
    OK,
    POOL_READ_WRITE,
    Event,
    Libdaos,
    ObjectId,
    check,
)
from objectcache_storage_server.engines.stores.shared_store import StoreTimeout

CALLS_MAX = 256  # under way at a time; more wait until one has ended
WAITING_MAX = 4096  # of those, what a full load has is some hundred
POLL_US = 500  # how late a call may be begun while others are under way
POLLED_MAX = 64  # ended calls that are taken at once
CLOSE_TIMEOUT_S = 5.0

# Begins a call with the event of that address; its buffers live as long as it is referred to.
Begin = Callable[[int], int]


class DaosClient:
    """Opens `container` of `pool`. Raises `Unavailable`."""

    transaction = NO_TRANSACTION

    def __init__(self, calls: Libdaos, pool: str, container: str, timeout_s: float) -> None:
        self.calls = calls
        self.pool, self.container = pool, container
        self._queue: queue.Queue[tuple[Future[int], Begin] | None] = queue.Queue(WAITING_MAX)
        self._under_way: dict[int, tuple[Future[int], Begin, Event]] = {}
        self._is_closed = False
        self._events = c_uint64()
        self._pool, self._container = c_uint64(), c_uint64()
        self._thread = threading.Thread(target=self._run, name="daos-calls", daemon=True)
        self._thread.start()
        try:
            self._open(time.monotonic() + timeout_s)
        except BaseException:
            self.close()
            raise

    def begin(self, call: Begin) -> Future[int]:
        """Have a call made; the future has its answer. A `cancel` that succeeds says that it was
        not begun. Raises `Unavailable` where too many wait.
        """
        future: Future[int] = Future()
        try:
            self._queue.put_nowait((future, call))
        except queue.Full:
            raise Unavailable(f"DAOS does not answer: {WAITING_MAX} calls wait") from None
        return future

    def call(self, what: str, deadline_s: float, call: Begin) -> int:
        """The answer of a call. Raises `StoreTimeout` at the deadline; the call may go on then."""
        return self.answer(self.begin(call), what, deadline_s)

    def answer(self, future: Future[int], what: str, deadline_s: float) -> int:
        """The answer of a call that was begun; see `call`."""
        try:
            left_s = min(deadline_s - time.monotonic(), threading.TIMEOUT_MAX)
            return future.result(max(left_s, 0.0))
        except TimeoutError:
            future.cancel()
            raise StoreTimeout(f"{what}: DAOS did not answer in time") from None

    def open_object(self, number: int, kind: int, spread: int, deadline_s: float) -> c_uint64:
        """The handle of an object of this container."""
        name, handle = ObjectId(number, 0), c_uint64()

        def begin(event: int) -> int:
            made: int = self.calls.obj_generate_oid2(
                self._container, byref(name), kind, 0, spread, 0
            )
            return made or self.calls.obj_open(
                self._container, name, OBJECT_READ_WRITE, byref(handle), event
            )

        what = f"open object {number} of container {self.container}"
        check(self.call(what, deadline_s, begin), what)
        return handle

    def open_transaction(self, deadline_s: float) -> Transaction:
        """A transaction, which somebody closes."""
        handle = c_uint64()
        opened = self.call(
            "open a transaction",
            deadline_s,
            lambda event: self.calls.tx_open(self._container, byref(handle), 0, event),
        )
        check(opened, "open a transaction")
        return Transaction(self, handle)

    def close(self) -> None:
        """End the thread. One that hangs in the library is left behind."""
        try:
            self._queue.put_nowait(None)
        except queue.Full:  # DAOS does not answer: what waits is not begun
            self._is_closed = True
        self._thread.join(CLOSE_TIMEOUT_S)

    def _open(self, deadline_s: float) -> None:
        what = f"connect to DAOS pool {self.pool}"
        pool, container = self.pool.encode(), self.container.encode()
        answer = self.call(
            what,
            deadline_s,
            lambda event: self.calls.pool_connect2(
                pool, None, POOL_READ_WRITE, byref(self._pool), None, event
            ),
        )
        check(answer, what)
        what = f"open container {self.container} of DAOS pool {self.pool}"
        answer = self.call(
            what,
            deadline_s,
            lambda event: self.calls.cont_open2(
                self._pool, container, CONTAINER_READ_WRITE, byref(self._container), None, event
            ),
        )
        check(answer, what)

    # --- in the thread ---

    def _run(self) -> None:
        started = self.calls.init()
        if started == OK:
            started = self.calls.eq_create(byref(self._events))
        while not self._is_closed or self._under_way:
            self._begin_waiting(started)
            if self._under_way:
                self._poll()
        if self._container:
            self.calls.cont_close(self._container, None)
        if self._pool:
            self.calls.pool_disconnect(self._pool, None)
        if started == OK:
            self.calls.eq_destroy(self._events, 0)
            self.calls.fini()

    def _begin_waiting(self, started: int) -> None:
        """Begin the calls that wait; where none is under way, wait for one."""
        while not self._is_closed and len(self._under_way) < CALLS_MAX:
            try:
                task = self._queue.get(block=not self._under_way)
            except queue.Empty:
                return
            if task is None:
                self._is_closed = True
            else:
                self._begin(*task, started)

    def _begin(self, future: Future[int], call: Begin, started: int) -> None:
        if not future.set_running_or_notify_cancel():
            return
        if started != OK:
            future.set_result(started)
            return
        event = Event()
        address = addressof(event)
        self.calls.event_init(address, self._events, None)
        code = call(address)
        if code == OK:
            self._under_way[address] = (future, call, event)
        else:
            self.calls.event_fini(address)
            future.set_result(code)

    def _poll(self) -> None:
        ended = (POINTER(Event) * POLLED_MAX)()
        count = self.calls.eq_poll(self._events, 1, POLL_US, POLLED_MAX, ended)
        for each in ended[: max(0, count)]:
            address = addressof(each.contents)
            future, _, event = self._under_way.pop(address)
            self.calls.event_fini(address)
            future.set_result(event.error)


class Transaction:
    """Makes calls one after the other, that are carried out together; `transaction` is a handle."""

    def __init__(self, client: DaosClient, handle: c_uint64) -> None:
        self._client = client
        self.transaction = handle
        self._last: Future[int] | None = None

    def call(self, what: str, deadline_s: float, call: Begin) -> int:
        """See `DaosClient.call`."""
        self._last = self._client.begin(call)
        return self._client.answer(self._last, what, deadline_s)

    def commit(self, what: str, deadline_s: float) -> int:
        """The answer of the commit."""
        return self.call(what, deadline_s, partial(self._client.calls.tx_commit, self.transaction))

    def close(self) -> None:
        """Let go of it, as soon as its last call has ended, which may be after its deadline."""
        if self._last is None:
            self._begin_close()
        else:
            self._last.add_done_callback(lambda _: self._begin_close())

    def _begin_close(self) -> None:
        with suppress(Unavailable):
            self._client.begin(partial(self._client.calls.tx_close, self.transaction))
