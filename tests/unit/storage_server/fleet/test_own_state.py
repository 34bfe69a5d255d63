"""What a storage server says of itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from objectcache_runtime.settings import ServerSettings, Settings, StorageSettings
from objectcache_schemas.operators.server_list import ServerState
from objectcache_storage_server.engines.memory.engine import MemoryEngine
from objectcache_storage_server.fleet.own_state import OwnState, advertised_address, no_log
from objectcache_storage_server.fleet.server_directory import AloneDirectory
from objectcache_storage_server.service import Service


@pytest.mark.parametrize(
    ("listen", "advertised", "told"),
    [
        ("", "", ""),
        ("storage-1.internal:9100", "", "storage-1.internal:9100"),
        ("0.0.0.0:9100", "", ""),  # nobody can connect to that
        ("[::]:9100", "", ""),
        ("storage-1.internal:0", "", ""),
        ("0.0.0.0:9100", "storage-1.internal:9100", "storage-1.internal:9100"),
    ],
)
def test_others_are_told_an_address_that_they_can_connect_to(
    listen: str, advertised: str, told: str
) -> None:
    storage = StorageSettings(listen=listen, advertised_address=advertised)
    assert advertised_address(Settings(storage=storage)) == told


class Told(AloneDirectory):
    """Others, as they were told of."""

    def __init__(self, *server_ids: bytes) -> None:
        self._others = [ServerState(server_id=one, host_id="h") for one in server_ids]

    def others(self) -> Sequence[ServerState]:
        return self._others


@pytest.mark.parametrize(
    ("others", "is_first"), [((), True), ((b"b",), True), ((b"c", b"B"), False)]
)
def test_one_of_all_servers_is_the_first(
    tmp_path: Path, others: tuple[bytes, ...], is_first: bool
) -> None:
    settings = Settings(server=ServerSettings(data_dir=str(tmp_path)))
    service = Service(settings, MemoryEngine())
    try:
        own = OwnState(settings, b"a", service.gates, Told(*others), no_log)
        assert own.is_first() is is_first
        assert own.state().server_id == b"a"
    finally:
        service.close()
