"""The server's side of verbs where one client is slow to connect to; the device is played."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from objectcache_fabrics.peers import WriteTimeout
from objectcache_fabrics.staging_memory import StagingMemory
from objectcache_fabrics.verbs import fabric as fabric_module
from objectcache_fabrics.verbs.address import VerbsAddress
from objectcache_fabrics.verbs.fabric import VerbsFabric

DEADLINE_S = 20.0
IPV4 = bytes(10) + b"\xff\xff" + bytes([10, 77, 0, 1])
SLOW, PROMPT = (
    VerbsAddress(qp_num=number, psn=0, gid=IPV4, receives=8).to_bytes() for number in (1, 2)
)


class PlayedDevice:
    """Registers anything."""

    name = "played0:1"

    def __init__(self, name: str) -> None: ...

    def register(self, *_: int, **__: bool) -> PlayedDevice:
        return self

    def close(self) -> None: ...


@pytest.mark.parametrize("closes_meanwhile", [False, True])
def test_a_client_that_is_slow_to_connect_to_keeps_no_other_waiting(
    monkeypatch: pytest.MonkeyPatch, closes_meanwhile: bool
) -> None:
    connecting, gate = threading.Event(), threading.Event()

    class Peer:
        def __init__(self, *arguments: Any) -> None:
            self.address: VerbsAddress = arguments[3]
            self.is_closed = False
            if self.address.qp_num == 1:
                connecting.set()
                assert gate.wait(DEADLINE_S)

        def close(self) -> None:
            self.is_closed = True

    monkeypatch.setattr(fabric_module, "VerbsDevice", PlayedDevice)
    monkeypatch.setattr(fabric_module, "VerbsPeer", Peer)
    fabric = VerbsFabric(StagingMemory(4096, 4096), "played0", WriteTimeout(DEADLINE_S))
    with ThreadPoolExecutor() as pool:
        slow = pool.submit(fabric.open, SLOW)
        try:
            assert connecting.wait(DEADLINE_S)
            prompt, _ = pool.submit(fabric.open, PROMPT).result(DEADLINE_S)
            assert not slow.done()
            if closes_meanwhile:
                pool.submit(fabric.close).result(DEADLINE_S)
                assert prompt.is_closed  # type: ignore[attr-defined]
        finally:
            gate.set()
        slow.result(DEADLINE_S)
    if not closes_meanwhile:
        fabric.close()
