"""This process' NIXL agent: its memory is written from outside, and layers are notified.

The library has nothing to wait on, so a thread looks for notifications while deliveries are under
way, and sleeps while there are none. Without that thread's looking some transports make no progress
either.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import msgspec

from objectcache_fabrics.endpoints import FabricEndpoint
from objectcache_fabrics.nixl.agent import MemoryPiece, NixlAgent
from objectcache_fabrics.registered_memory import DRAM, DeviceMemory
from objectcache_schemas.errors import ObjectCacheError, Unavailable, Unsupported
from objectcache_schemas.messages.message import Message
from objectcache_schemas.messages.sessions import LayersReady, NixlNames, RegisterRemoteTarget

# Between looks: what a layer may be late for it. A look takes tens of microseconds of the
# processor's time with the sleep before it, so it is longer where layers come slower.
LOOK_PAUSE_S = 50e-6
LOOK_PAUSE_MAX_S = 200e-6  # writes over TCP need the looks to get on
LOOK_PAUSE_SHARE = 1 / 16  # of the time between the last two
TIMEOUT_S = 30.0  # for the thread to answer; it never waits for a peer
DEVICE_IDS = 1 << 16  # that the wire has; far above what a server lets one session register

logger = logging.getLogger("objectcache.fabrics.nixl")
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
        self._pause_s = LOOK_PAUSE_S
        self._heard_s = 0.0
        self._closed = False
        self._drams = itertools.count()
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
        _answer(started)

    def register(self, memory: DeviceMemory) -> tuple[RegisterRemoteTarget, Any]:
        piece = MemoryPiece(
            memory.address, memory.length_bytes, self._device_id(memory), memory.memory
        )

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

    def _device_id(self, memory: DeviceMemory) -> int:
        """A GPU's own; one of its own for any other registration.

        The server's agent forgets no registration. It looks memory up by device and address, and
        may find one that was let go where the two overlap, as they do when the system hands the
        addresses out again. DRAM has no device, so no two registrations are in one.
        """
        return next(self._drams) % DEVICE_IDS if memory.memory == DRAM else memory.device_id

    def unregister(self, registered: Any) -> None:
        with suppress(Unavailable):  # it has ended, and with it all registrations
            self._call(lambda agent: agent.unregister(registered[0]))

    def listen(self, deliveries: int) -> None:
        with self._condition:
            self._listening = deliveries
            self._pause_s = LOOK_PAUSE_S  # a first layer is seen at once
            self._heard_s = 0.0
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
        return _answer(future)

    # --- the thread ---

    def _run(
        self, names: NixlNames, heard: Callable[[LayersReady], None], started: Future[None]
    ) -> None:
        try:
            agent = NixlAgent(names.client, self._devices, self._ucx_settings)
        except Unavailable as error:
            started.set_exception(Unsupported(error.message))
            return
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
        time.sleep(self._pause_s)
        return True

    def _hear(self, agent: NixlAgent, server: str, heard: Callable[[LayersReady], None]) -> None:
        messages = agent.notifications().get(server)
        if not messages:
            return
        now_s, before_s = time.monotonic(), self._heard_s
        self._heard_s = now_s
        self._pause_s = look_pause_s(now_s - before_s) if before_s else LOOK_PAUSE_S
        for message in messages:
            try:
                heard(_READY.decode(message))
            except msgspec.MsgspecError:
                logger.warning("a notification that is none of ours")

    def __repr__(self) -> str:
        return f"<NixlEndpoint {self._listening} deliveries>"


def _answer(future: Future[Any]) -> Any:
    """What the thread has done. Raises what it raised, and `Unavailable` where it does nothing."""
    try:
        return future.result(TIMEOUT_S)
    except TimeoutError as error:
        raise Unavailable(f"NIXL has not answered for {TIMEOUT_S:g} s") from error


def look_pause_s(between_s: float) -> float:
    """How long to wait before the next look, when so long was between the last two layers."""
    return min(max(LOOK_PAUSE_S, LOOK_PAUSE_SHARE * between_s), LOOK_PAUSE_MAX_S)
