"""The bell: who appends notifies the log's head, and whoever watches it is woken.

A watch may be lost without a word (an OSD that restarts, a client that was away), and a bell that
was rung meanwhile is not heard: a thread asks for its state and registers again. Silence means
nothing; who waits asks for the log's end from time to time.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from ctypes import byref, c_uint64, c_void_p
from typing import Any

from objectcache_storage_server.engines.stores.rados.librados import (
    CANCELLED,
    OK,
    WATCH_CALLBACK,
    WATCH_ERROR_CALLBACK,
    Librados,
    RadosPool,
)

CHECK_S = 1.0  # how often the watch is looked at
POLL_S = 0.02
CLOSE_TIMEOUT_S = 1.0
NOTIFY_TIMEOUT_MS = 1000  # of a watcher that does not answer; the least there is
RINGS_MAX = 8  # under way at a time: one that is not rung is heard a second later

logger = logging.getLogger("objectcache.storage_server.engines.stores")


class RadosBell:
    """Rings, and is heard, by the object `name`."""

    def __init__(self, pool: RadosPool, cluster: c_void_p, name: str) -> None:
        self._pool, self._cluster, self._name = pool, cluster, name.encode()
        self._calls: Librados = pool.calls
        self._changed = threading.Condition()
        self._heard = 0  # the log has ended there, or later
        self._round = 0  # grows where a bell may have been missed, and when waits are ended
        self._is_closed = False
        self._dropped = threading.Event()
        self._watch = c_uint64()
        self._rings: list[c_void_p] = []
        # The library calls these from threads of its own, so they live as long as the watch.
        self._on_ring = WATCH_CALLBACK(self._hear)
        self._on_error = WATCH_ERROR_CALLBACK(self._lose)
        self._thread = threading.Thread(target=self._keep_watch, name="rados-bell", daemon=True)
        self._thread.start()

    def ring(self, end: int) -> None:
        """Tell all who watch that the log ends at `end` now. Waits for nothing."""
        quick = self._calls.quick
        with self._changed:
            self._rings = [ring for ring in self._rings if not self._release_ended(ring)]
            if len(self._rings) >= RINGS_MAX or self._is_closed:
                return
            completion = self._completion()
            word = b"%d" % end
            quick.aio_notify(
                self._pool.handle, self._name, completion, word, len(word), NOTIFY_TIMEOUT_MS,
                None, None,
            )  # fmt: skip
            self._rings.append(completion)

    def wait(self, number: int, timeout_s: float) -> None:
        """Return when record `number` may be there, at the latest after `timeout_s`."""
        with self._changed:
            before = self._round
            self._changed.wait_for(
                lambda: self._heard > number or self._round != before or self._is_closed, timeout_s
            )

    def end_waits(self) -> None:
        """Have those return who wait now."""
        with self._changed:
            self._round += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Wake who waits, and let the watch go."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._dropped.set()
        self._thread.join()
        self._calls.waiting.watch_flush(self._cluster)
        for ring in self._rings:
            self._calls.quick.aio_release(ring)

    # --- in threads of the library ---

    def _hear(
        self, _: Any, notify: int, watch: int, notifier: int, data: int | None, size_bytes: int
    ) -> None:
        if self._is_closed:
            return
        word = ctypes.string_at(data, size_bytes) if data else b""
        self._calls.quick.notify_ack(self._pool.handle, self._name, notify, watch, None, 0)
        with self._changed:
            if word.isdigit() and len(word) <= 20:
                self._heard = max(self._heard, int(word))
            self._changed.notify_all()

    def _lose(self, _: Any, watch: int, code: int) -> None:
        self._dropped.set()

    # --- in a thread of its own ---

    def _keep_watch(self) -> None:
        while not self._is_closed:
            self._dropped.clear()
            if self._register():
                self._stay()
                self._unregister()
            else:
                self._dropped.wait(CHECK_S)

    def _stay(self) -> None:
        """Return when the watch is lost, or the bell is closed."""
        with self._changed:
            self._round += 1  # what was rung before was not heard
            self._changed.notify_all()
        while not self._is_closed and not self._dropped.wait(CHECK_S):
            if self._calls.waiting.watch_check(self._pool.handle, self._watch) < 0:
                break
        if not self._is_closed:
            logger.info("the watch on the log in pool %s was lost", self._pool.name)

    def _register(self) -> bool:
        """Whether the watch is there, or else was refused or the bell closed. Where Ceph does not
        answer the library asks again, so this waits for as long as that lasts.
        """
        completion = self._completion()
        code = self._calls.waiting.aio_watch2(
            self._pool.handle, self._name, completion, byref(self._watch),
            self._on_ring, self._on_error, 0, None,
        )  # fmt: skip
        while code == OK and not self._calls.quick.aio_is_complete(completion):
            if self._is_closed:
                code = CANCELLED
            time.sleep(POLL_S)
        code = code or self._calls.quick.aio_get_return_value(completion)
        self._calls.quick.aio_release(completion)
        return bool(code == OK)

    def _unregister(self) -> None:
        completion = self._completion()
        self._calls.waiting.aio_unwatch(self._pool.handle, self._watch, completion)
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        while not self._calls.quick.aio_is_complete(completion) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        self._calls.quick.aio_release(completion)

    def _completion(self) -> c_void_p:
        completion = c_void_p()
        self._calls.quick.aio_create_completion2(None, None, byref(completion))
        return completion

    def _release_ended(self, ring: c_void_p) -> bool:
        if not self._calls.quick.aio_is_complete(ring):
            return False
        self._calls.quick.aio_release(ring)
        return True
