"""A get's descriptor is decoded at most once in each process, whatever each looks up in it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import objectcache
from objectcache_schemas.accounts import Access
from tests import servers
from tests.integration.counted_decodes import DECODED
from tests.integration.tenants import Tenant, grant, new_tenant
from tests.servers import RunningServer, ServerProcess, start_server

LAYOUT = objectcache.KvLayout(
    num_layers=2, chunk_tokens=16, per_layer_chunk_bytes=4096, dtype="uint8", fingerprint="f"
)
KEY = "mine/chunk"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunningServer:
    """Both processes, counting."""

    def counting(module: str, arguments: Sequence[str], log: Path) -> ServerProcess:
        return ServerProcess("tests.integration.counted_decodes", [module, *arguments], log)

    monkeypatch.setattr(servers, "ServerProcess", counting)
    return start_server(tmp_path)


def decodes(server: RunningServer) -> dict[str, int]:
    """How often each process has decoded a descriptor."""
    return {
        name: (server.data_dir / f"{name}.log").read_text().count(DECODED)
        for name in ("gateway", "storage")
    }


def client_of(server: RunningServer, tenant: Tenant | None = None) -> objectcache.Client:
    pair = tenant.credentials if tenant else server.credentials
    return objectcache.Client(
        server.endpoint, access_key=pair.access_key, secret_key=pair.secret_key
    )


def test_a_get_by_key_of_who_may_read_a_prefix_staged_in_the_gateway_is_decoded_once(
    server: RunningServer,
) -> None:
    data = np.frombuffer(secrets.token_bytes(2 * 4096), np.uint8).reshape(1, 2, 4096)
    with server, client_of(server) as owner:
        owner.kv_bucket("prefixes", LAYOUT, create=True).put([KEY], data)
        reader = new_tenant(
            server, "reader", grants=(grant("prefixes", Access.READ, prefix="mine/"),)
        )
        with client_of(server, reader) as client:
            bucket = client.kv_bucket("prefixes", LAYOUT)
            target = client.shared_memory_target(data.nbytes)
            before = decodes(server)
            with bucket.fetch([KEY], path="buffer", target=target) as delivery:
                assert bytes(delivery.wait()) == data.tobytes()
            after = decodes(server)
    assert {name: after[name] - before[name] for name in after} == {"gateway": 1, "storage": 1}
