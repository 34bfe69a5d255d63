"""A session whose targets a fabric reaches: memory is registered over it, and layers are announced
over the fabric itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from objectcache.sessions.session_wire import SessionWire
from objectcache.sessions.target_session import LayerSink, TargetSession
from objectcache_fabrics.endpoints import FabricEndpoint
from objectcache_fabrics.registered_memory import DeviceMemory
from objectcache_schemas.messages.sessions import FabricOpened, OpenFabric, TargetRegistered


class FabricSession(TargetSession):
    """A joined session with its endpoint."""

    def __init__(self, wire: SessionWire, endpoint: FabricEndpoint, timeout_s: float) -> None:
        """Open the fabric. Raises what `FabricEndpoint.connect` does, and the server's refusal."""
        self._endpoint = endpoint
        self._listening = 0
        self._ends_because = ""
        self._count_lock = threading.Lock()
        super().__init__(wire, timeout_s)
        endpoint.on_end = self._endpoint_ended
        try:
            hello = OpenFabric(transport=endpoint.name, endpoint=endpoint.hello())
            opened = self.ask(hello, FabricOpened)
            endpoint.connect(opened.endpoint, self._dispatch, self.tell)
        except BaseException:
            self.close()
            raise

    def register_memory(self, memory: DeviceMemory) -> tuple[bytes, Any]:
        """Register memory; returns the target's id, and what `unregister_memory` takes.

        Raises `Unavailable` when the session has ended or the server cannot reach the memory, or
        what it says against it.
        """
        with self.attended():  # the server looks whether it can be reached
            message, registered = self._endpoint.register(memory)
            try:
                reply = self.ask(message, TargetRegistered)
            except BaseException:
                self._endpoint.unregister(registered)
                raise
        return reply.target_id, registered

    def unregister_memory(self, registered: Any) -> None:
        """Let the memory go; the server does not touch it any more."""
        self._endpoint.unregister(registered)

    def listen(self, sink: LayerSink) -> int:
        tag = super().listen(sink)
        self._count(1)
        return tag

    def forget(self, tag: int) -> None:
        if self._forget(tag):
            self._count(-1)

    @contextmanager
    def attended(self) -> Generator[None]:
        self._count(1)
        try:
            with super().attended():
                yield
        finally:
            self._count(-1)

    def release(self, target_id: bytes, on_end: Callable[[bool], None]) -> None:
        self._count(1)  # some writes end only while this side looks

        def ended(quiet: bool) -> None:
            self._count(-1)
            on_end(quiet)

        super().release(target_id, ended)

    def _count(self, change: int) -> None:
        with self._count_lock:
            self._listening += change
            self._endpoint.listen(self._listening)

    def _endpoint_ended(self) -> None:
        if self._ends_because:  # and with the session the endpoint
            return
        self._end("the fabric's endpoint has ended")
        self._wire.shut_down()

    def _end(self, reason: str) -> None:
        self._ends_because = self._ends_because or reason
        self._endpoint.close()  # first: over most fabrics memory is not written any more then
        super()._end(self._ends_because)
