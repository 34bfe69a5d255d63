"""The client's end of verbs: memory that the server may write, and a thread that hears of layers.

A server that dies tells nothing over the connection: the session learns it from its own wire, and
closes the endpoint.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from objectcache_fabrics.endpoints import FabricEndpoint
from objectcache_fabrics.registered_memory import DeviceMemory
from objectcache_fabrics.verbs.address import VerbsAddress
from objectcache_fabrics.verbs.device import VerbsDevice, VerbsRegion
from objectcache_fabrics.verbs.queue_pair import Completion, QueuePair
from objectcache_schemas.errors import InvalidRequest, Unavailable
from objectcache_schemas.messages.message import Message
from objectcache_schemas.messages.sessions import LayersReady, RegisterRemoteTarget, ReturnCredits

RECEIVES = 128  # announcements that may be on their way; later watermarks wait and replace others
TAKEN_TOLD_AFTER = RECEIVES // 2  # each time is a message

logger = logging.getLogger("objectcache.fabrics.verbs")


class VerbsEndpoint(FabricEndpoint):
    """One session's queue pair, in a protection domain of its own: no other session's server
    reaches what is registered here.
    """

    name = "verbs"

    def __init__(self, device_name: str = "") -> None:
        """Open the device, without a name the first that is active. Raises `Unavailable`, with
        what is missing.
        """
        self._taken = 0  # announcements, since the session began
        self._told_taken = 0
        self._regions: dict[VerbsRegion, object] = {}  # with what keeps their memory alive
        self._lock = threading.Lock()
        self._closing = False
        self._heard: Callable[[LayersReady], None] = _not_connected
        self._tell: Callable[[Message], None] = _not_connected
        self._device = VerbsDevice(device_name)
        try:
            self._pair = self._opened()
        except Unavailable:
            self._device.close()
            raise
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread: threading.Thread | None = None

    def _opened(self) -> QueuePair:
        pair = QueuePair(
            self._device,
            send_depth=0,
            receive_depth=RECEIVES,
            reads_answered=self._device.reads_answered_max,
        )
        pair.post_receives(RECEIVES)
        return pair

    def hello(self) -> bytes:
        return self._pair.address.to_bytes()

    def connect(
        self,
        answer: bytes,
        heard: Callable[[LayersReady], None],
        tell: Callable[[Message], None],
    ) -> None:
        self._heard, self._tell = heard, tell
        try:
            server = VerbsAddress.from_bytes(answer)
        except InvalidRequest as error:
            raise Unavailable(f"the server's answer makes no sense: {error.message}") from error
        with self._lock:
            if self._closing:
                raise Unavailable("the session has ended")
            self._pair.connect(server)
            self._pair.arm()
            self._thread = threading.Thread(target=self._run, name="objectcache-verbs", daemon=True)
            self._thread.start()

    def register(self, memory: DeviceMemory) -> tuple[RegisterRemoteTarget, Any]:
        if memory.memory != "DRAM":
            raise Unavailable("verbs reach memory of the host alone; use nixl for a GPU's")
        with self._lock:
            if self._closing:
                raise Unavailable("the session has ended")
            region = self._device.register(
                memory.address, memory.length_bytes, remote_write=True, remote_read=True
            )
            self._regions[region] = memory.owner
        message = RegisterRemoteTarget(
            length_bytes=region.length_bytes, address=region.address, key=region.remote_key
        )
        return message, region

    def unregister(self, registered: VerbsRegion) -> None:
        with self._lock:
            if registered in self._regions:
                registered.close()
                del self._regions[registered]

    def listen(self, deliveries: int) -> None:
        """The thread is woken by the device. What was told of credits may have been lost, and a
        delivery that waits for them would tell nothing.
        """
        if self._told_taken and not self._closing:
            self._tell(ReturnCredits(count=self._told_taken))

    # --- the thread ---

    def _run(self) -> None:
        try:
            with select.epoll() as poll:
                poll.register(self._pair.descriptor, select.EPOLLIN)
                poll.register(self._wake, select.EPOLLIN)
                while not self._closing:
                    self._take_completions()
                    poll.poll()
                    self._pair.take_events()
                    self._pair.arm()
        except Unavailable as error:
            logger.warning("a session over verbs is lost: %s", error.message)
        except Exception:
            logger.exception("the thread of a session over verbs failed")
        finally:
            try:
                self._let_go()
            except Unavailable:
                logger.exception("%r is left to the end of the process", self)
            self.on_end()

    def _take_completions(self) -> None:
        while completions := self._pair.poll():
            for completion in completions:
                self._take(completion)
            self._pair.post_receives(len(completions))
            self._taken += len(completions)
        if self._taken - self._told_taken >= TAKEN_TOLD_AFTER:
            self._told_taken = self._taken
            self._tell(ReturnCredits(count=self._taken))

    def _take(self, completion: Completion) -> None:
        if completion.announcement is None:
            raise Unavailable(f"verbs: {completion.failure}")
        tag, end_layer = completion.announcement
        self._heard(LayersReady(tag=tag, end_layer=end_layer))

    def _let_go(self) -> None:
        """Close all, in the order that the device wants; once. What does not close keeps nothing
        else open, and memory whose region does not is kept to the end of the process.
        """
        with self._lock, ExitStack() as closing:
            self._closing = True
            os.close(self._wake)
            closing.callback(self._device.close)
            for region, owner in self._regions.items():
                _kept_alive[region] = owner
                closing.callback(_close_region, region)
            self._regions.clear()
            closing.callback(self._pair.close)

    def close(self) -> None:
        """When it returns, the server can write to none of the memory; on the endpoint's own
        thread, soon after.
        """
        with self._lock:
            closing, self._closing = self._closing, True
            if not closing:
                os.eventfd_write(self._wake, 1)
        thread = self._thread
        if thread is None:
            if not closing:
                self._let_go()
        elif thread is not threading.current_thread():
            thread.join()

    def __repr__(self) -> str:
        return f"<VerbsEndpoint on {self._device.name}, {len(self._regions)} regions>"


_kept_alive: dict[VerbsRegion, object] = {}  # memory that the server might still reach, by region


def _close_region(region: VerbsRegion) -> None:
    region.close()
    del _kept_alive[region]


def _not_connected(_: object) -> None:
    """Nobody hears of anything before `connect`."""
