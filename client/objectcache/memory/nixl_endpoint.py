"""This process' NIXL agent: its memory is written from outside, and layers are notified.

The library has nothing to wait on, so a thread looks for notifications while deliveries are under
way, and sleeps while there are none. Without that thread's looking some transports make no progress
either.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import msgspec

from objectcache.memory.fabric_session import DeviceMemory, FabricEndpoint
from objectcache_schemas.errors import ObjectCacheError, Unavailable
from objectcache_schemas.fabric.nixl_agent import MemoryPiece, NixlAgent
from objectcache_schemas.message import Message
from objectcache_schemas.target_messages import LayersReady, NixlNames, RegisterRemoteTarget

LOOK_PAUSE_S = 50e-6  # what a layer may be late for it; a look takes a few microseconds
TIMEOUT_S = 30.0  # for the thread to answer; it never waits for a peer

logger = logging.getLogger("objectcache.memory.nixl")
_READY = msgspec.msgpack.Decoder(LayersReady)
_NAMES = msgspec.msgpack.Decoder(NixlNames)


class NixlEndpoint(FabricEndpoint):
    """One session's agent. `devices` and `ucx_settings` as in `NixlAgent`."""

    name = "nixl"

    def __init__(self, devices: str = "", ucx_settings: str = "") -> None:
        self._devices = devices
        self._ucx_settings = ucx_settings
        self._condition = threading.Condition()
        self._asked: deque[Callable[[NixlAgent], None]] = deque()
        self._listening = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    def hello(self) -> bytes:
        return b""

    def connect(
        self,
        answer: bytes,
        heard: Callable[[LayersReady], None],
        tell: Callable[[Message], None],
    ) -> None:
        try:
            names = _NAMES.decode(answer)
        except msgspec.MsgspecError as error:
            raise Unavailable(f"the server's answer makes no sense: {error}") from error
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(names, heard, started), name="objectcache-nixl", daemon=True
        )
        self._thread.start()
        started.result(TIMEOUT_S)

    def register(self, memory: DeviceMemory) -> tuple[RegisterRemoteTarget, Any]:
        piece = MemoryPiece(memory.address, memory.length_bytes, memory.device_id, memory.memory)

        def register(agent: NixlAgent) -> tuple[RegisterRemoteTarget, Any]:
            registered = agent.register(piece)
            message = RegisterRemoteTarget(
                length_bytes=piece.length_bytes,
                address=piece.address,
                device_id=piece.device_id,
                memory=piece.memory,
                metadata=agent.metadata(registered),
            )
            return message, (registered, memory.owner)

        told: tuple[RegisterRemoteTarget, Any] = self._call(register)
        return told

    def unregister(self, registered: Any) -> None:
        with suppress(Unavailable):  # it has ended, and with it all registrations
            self._call(lambda agent: agent.unregister(registered[0]))

    def listen(self, deliveries: int) -> None:
        with self._condition:
            self._listening = deliveries
            self._condition.notify()

    def close(self) -> None:
        """End it, and wait for that: the library must not be at work when the interpreter ends."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(TIMEOUT_S)

    def _call(self, function: Callable[[NixlAgent], Any]) -> Any:
        future: Future[Any] = Future()

        def run(agent: NixlAgent) -> None:
            try:
                future.set_result(function(agent))
            except BaseException as error:
                future.set_exception(error)

        with self._condition:
            if self._closed:
                raise Unavailable("the session has ended")
            self._asked.append(run)
            self._condition.notify()
        try:
            return future.result(TIMEOUT_S)
        except TimeoutError as error:
            raise Unavailable(f"NIXL has not answered for {TIMEOUT_S:g} s") from error

    # --- the thread ---

    def _run(
        self, names: NixlNames, heard: Callable[[LayersReady], None], started: Future[None]
    ) -> None:
        try:
            agent = NixlAgent(names.client, self._devices, self._ucx_settings)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        try:
            self._serve(agent, names.server, heard)
        finally:
            with self._condition:
                self._closed = True
            while self._asked:
                self._asked.popleft()(agent)
            agent.close()
            self.on_end()

    def _serve(self, agent: NixlAgent, server: str, heard: Callable[[LayersReady], None]) -> None:
        try:
            while self._wait():
                while self._asked:
                    self._asked.popleft()(agent)
                self._hear(agent, server, heard)
        except ObjectCacheError as error:
            logger.warning("a session over NIXL is lost: %s", error.message)
        except Exception:
            logger.exception("the NIXL agent failed")

    def _wait(self) -> bool:
        """Sleep until there is something to do; false when it has ended."""
        with self._condition:
            while not (self._asked or self._listening or self._closed):
                self._condition.wait()
            if self._closed:
                return False
            if self._asked:
                return True
        time.sleep(LOOK_PAUSE_S)
        return True

    def _hear(self, agent: NixlAgent, server: str, heard: Callable[[LayersReady], None]) -> None:
        for message in agent.notifications().get(server, ()):
            try:
                heard(_READY.decode(message))
            except msgspec.MsgspecError:
                logger.warning("a notification that is none of ours")

    def __repr__(self) -> str:
        return f"<NixlEndpoint {self._listening} deliveries>"
