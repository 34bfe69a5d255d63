"""The client's end where a part of it does not close; the device is played here."""

from __future__ import annotations

from typing import Any

import pytest

from objectcache_fabrics.registered_memory import DeviceMemory
from objectcache_fabrics.verbs import endpoint as endpoint_module
from objectcache_fabrics.verbs.endpoint import VerbsEndpoint
from objectcache_schemas.errors import Unavailable


class Part:
    """One thing to close, which notes that it was asked to, and refuses where the test says so."""

    def __init__(self, name: str, closed: list[str], refusing: str) -> None:
        self.name = name
        self.address, self.length_bytes, self.remote_key = 4096, 4096, 7
        self._closed = closed
        self._refusing = refusing

    def close(self) -> None:
        self._closed.append(self.name)
        if self.name == self._refusing:
            raise Unavailable(f"{self.name} does not close")


@pytest.mark.parametrize("refusing", ["pair", "region 1", "region 2", "device"])
def test_what_does_not_close_keeps_nothing_else_open(
    monkeypatch: pytest.MonkeyPatch, refusing: str
) -> None:
    closed: list[str] = []
    kept: dict[Any, object] = {}

    class Device(Part):
        reads_answered_max = 1
        region_count = 0

        def register(self, *_: int, **__: bool) -> Part:
            self.region_count += 1
            return Part(f"region {self.region_count}", closed, refusing)

    class Pair(Part):
        def post_receives(self, count: int) -> None: ...

    monkeypatch.setattr(endpoint_module, "_kept_alive", kept)
    monkeypatch.setattr(
        endpoint_module, "VerbsDevice", lambda _: Device("device", closed, refusing)
    )
    monkeypatch.setattr(
        endpoint_module, "QueuePair", lambda *_, **__: Pair("pair", closed, refusing)
    )
    endpoint = VerbsEndpoint("played0")
    for owner in ("first", "second"):
        endpoint.register(DeviceMemory(4096, 4096, owner))
    with pytest.raises(Unavailable, match=f"{refusing} does not close"):
        endpoint.close()
    assert closed[0] == "pair"  # from then on the server writes nothing
    assert closed[-1] == "device"
    assert sorted(closed) == ["device", "pair", "region 1", "region 2"]
    owners = {"region 1": "first", "region 2": "second"}
    assert list(kept.values()) == ([owners[refusing]] if refusing in owners else [])
    endpoint.close()
    assert len(closed) == 4
