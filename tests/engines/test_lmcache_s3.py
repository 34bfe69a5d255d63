"""LMCache's S3 connector and S3 L2 adapter, unmodified, against the gateway.

They know virtual hosts alone, so each runs in a process that has the bucket's name in a hosts file
of its own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config

from tests.clients.driver import Endpoint
from tests.clients.remote import RemoteDriver, names_can_be_mounted
from tests.servers import RunningServer, start_server

BUCKET = "lmcache-s3"
DOMAIN = "s3.localhost"
MIB = 1 << 20
DRIVERS = "tests.engines.lmcache_s3_driver"

pytestmark = pytest.mark.skipif(
    not names_can_be_mounted(), reason="this machine lets no process have an /etc/hosts of its own"
)


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory = tmp_path_factory.mktemp("server")
    with start_server(
        directory / "data",
        f"gateway.virtual_host_domains={DOMAIN}",
        f"gateway.audit_log={directory / 'audit.log'}",
    ) as running:
        judge_of(running).create_bucket(Bucket=BUCKET)
        yield running


@pytest.fixture(scope="module")
def judge(audited: RunningServer) -> Any:
    return judge_of(audited)


def judge_of(server: RunningServer) -> Any:
    credentials = server.credentials
    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        region_name="us-east-1",
        aws_access_key_id=credentials.access_key,
        aws_secret_access_key=credentials.secret_key,
        config=Config(s3={"addressing_style": "path"}),
    )


def driver(server: RunningServer, name: str, workspace: Path) -> RemoteDriver:
    credentials = server.credentials
    endpoint = Endpoint(
        f"http://{DOMAIN}:{server.port}", credentials.access_key, credentials.secret_key, None, True
    )
    names = [f"{BUCKET}.{DOMAIN}"]
    return RemoteDriver(f"{DRIVERS}:{name}", Path(sys.executable), endpoint, workspace, names)


@pytest.fixture(scope="module")
def connector(
    audited: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RemoteDriver]:
    with driver(
        audited, "S3ConnectorDriver", tmp_path_factory.mktemp("connector") / "home"
    ) as running:
        yield running


@pytest.fixture(scope="module")
def adapter(
    audited: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RemoteDriver]:
    with driver(audited, "S3L2Driver", tmp_path_factory.mktemp("adapter") / "home") as running:
        yield running


def objects(judge: Any, part_of_key: str) -> dict[str, dict[str, Any]]:
    """What is stored under keys that hold a text: bytes and ETag."""
    listed = judge.list_objects_v2(Bucket=BUCKET).get("Contents", [])
    return {
        entry["Key"]: {
            "bytes": judge.get_object(Bucket=BUCKET, Key=entry["Key"])["Body"].read(),
            "etag": entry["ETag"].strip('"'),
        }
        for entry in listed
        if part_of_key in entry["Key"]
    }


def answers(server: RunningServer, operation: str, key_part: str) -> list[str]:
    """Status of each such request of such a key in the audit log."""
    lines = (server.data_dir.parent / "audit.log").read_text().splitlines()
    return [
        line.split('" ')[1].split()[0] for line in lines if operation in line and key_part in line
    ]


def test_the_connector_puts_finds_and_gets_small_chunks(
    connector: RemoteDriver, judge: Any
) -> None:
    stored = connector.call("put", "small", 1, 3)
    at_rest = objects(judge, "_Llama-3.1-8B@1@0@3e")  # hashes 1000 to 1002
    assert [entry["bytes"] for _, entry in sorted(at_rest.items())] == stored
    assert connector.call("lookup", 1, 5) == ([True, True, True, False, False], 3)
    assert connector.call("get", "small", 1, 4) == [*stored, None]


def test_the_connector_puts_large_chunks_in_parts_and_gets_them_in_ranges(
    connector: RemoteDriver, judge: Any, audited: RunningServer
) -> None:
    deadline_s = time.monotonic() + 30
    stored = connector.call("put", "large", 2, 2)
    assert {len(chunk) for chunk in stored} == {10 * MIB}
    at_rest = objects(judge, "@7d")  # hashes 2000 and 2001
    assert [entry["bytes"] for _, entry in sorted(at_rest.items())] == stored
    assert all(entry["etag"].endswith("-2") for entry in at_rest.values())
    assert connector.call("get_one", "large", 2) == stored[0]
    assert connector.call("get", "large", 2, 2) == stored
    # The judge asked for the whole object, LMCache for its first 8 MiB and for the rest.
    while sorted(answers(audited, "REST.GET.OBJECT", "7d1")) != ["200", "206", "206"]:
        assert time.monotonic() < deadline_s, answers(audited, "REST.GET.OBJECT", "7d1")
        time.sleep(0.05)  # the log is written behind the answers


def test_the_connector_refuses_a_chunk_of_another_geometry_by_its_size_alone(
    connector: RemoteDriver,
) -> None:
    """Where sizes are equal it would not: why our own plug-in has the geometry in its keys."""
    connector.call("put", "small", 3, 1)
    assert connector.call("get", "large", 3, 1) == [None]


def test_the_connector_stores_nothing_in_layerwise_mode(
    connector: RemoteDriver, judge: Any
) -> None:
    """A fault of LMCache's: it compares a layer's size with a chunk's, and drops it."""
    connector.call("put_layers", 4)
    assert objects(judge, "@fa0") == {}  # hash 4000


def test_the_l2_adapter_stores_finds_loads_lists_and_deletes(
    adapter: RemoteDriver, judge: Any
) -> None:
    small = adapter.call("store", "small", 11, 3)
    large = adapter.call("store", "large", 12, 2)
    at_rest = objects(judge, f"{11000:064x}"[:-2])
    assert [entry["bytes"] for _, entry in sorted(at_rest.items())] == small
    assert adapter.call("lookup", 11, 5) == [0, 1, 2]
    assert adapter.call("load", "small", 11, 3) == small
    assert adapter.call("load", "large", 12, 2) == large

    listed = sorted(adapter.call("listed", 2))
    assert listed == sorted(
        [(f"{11000 + n:064x}", len(small[0])) for n in range(3)]
        + [(f"{12000 + n:064x}", len(large[0])) for n in range(2)]
    )
    adapter.call("delete", 11, 2)
    assert adapter.call("lookup", 11, 3) == [2]
    assert len(objects(judge, f"{11000:064x}"[:-2])) == 1
