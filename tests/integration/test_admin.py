"""The operator's commands against a storage server and an admin server, for every engine."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from objectcache_operations.console.app import app
from objectcache_schemas.descriptor import DeliveryMode, Descriptor
from objectcache_schemas.limits import MIB
from objectcache_schemas.messages.buckets import Bucket, GetBucket
from objectcache_schemas.records import BucketPolicy, Durability, Verification
from tests.servers import ServerProcess
from tests.storage_client import StorageClient

N, L, S = 40, 4, 65_536
KEYS = tuple(f"{index:064x}" for index in range(N))
CHUNKS = np.random.default_rng(5).integers(0, 256, (N, L, S), np.uint8)
ENGINES = ("memory", "files", "local")
SPACE = ("storage.capacity_bytes=134217728", "storage.data_file_bytes=67108864")


class Operated:
    """A storage server with chunks of one prefix in the bucket "kv"."""

    def __init__(self, engine: str, data_dir: Path, run_dir: Path) -> None:
        self.engine = engine
        self.data_dir = data_dir
        self.settings = (f"storage.engine={engine}", f"server.run_dir={run_dir}", *SPACE)
        self.start()
        with self.connect() as client:
            client.create_bucket("kv")
            descriptor = Descriptor(KEYS, L, 16, S, DeliveryMode.LAYERWISE)
            payload = CHUNKS.transpose(1, 0, 2).tobytes()
            assert client.kv_put("kv", descriptor.to_bytes(), payload) == (N, 0)

    def start(self) -> None:
        arguments = ["--data-dir", str(self.data_dir), *self._flags()]
        log = self.data_dir / "storage.log"
        self.process = ServerProcess("objectcache_storage_server", arguments, log)
        self.socket = self.process.wait_ready()
        more = ["--set", "admin.listen=off"]
        try:
            self.api = ServerProcess(
                "objectcache_gateway.admin", [*arguments, *more], self.data_dir / "admin.log"
            )
            self.api.wait_ready()
        except BaseException:
            self.process.kill()
            raise

    def stop(self) -> None:
        assert self.api.terminate() == 0
        assert self.process.terminate() == 0

    def connect(self) -> StorageClient:
        return StorageClient(self.socket)

    def admin(self, *arguments: str) -> Result:
        """`objectcache admin ...` on this server."""
        where = ["--data-dir", str(self.data_dir), *self._flags()]
        return CliRunner().invoke(app, ["admin", *arguments, *where])

    def document(self, *arguments: str, exit_code: int = 0) -> Any:
        """What a command prints with --json."""
        result = self.admin(*arguments, "--json")
        assert result.exit_code == exit_code, result.output
        return json.loads(result.stdout)

    def needs_local(self) -> None:
        if self.engine != "local":
            pytest.skip(f"engine {self.engine} has no policies, pins and checks")

    def _flags(self) -> list[str]:
        return [part for one in self.settings for part in ("--set", one)]


@pytest.fixture(scope="module", params=ENGINES)
def operated(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Operated]:
    with tempfile.TemporaryDirectory(prefix="objectcache-test-") as run_dir:  # short, for sockets
        running = Operated(request.param, tmp_path_factory.mktemp("data"), Path(run_dir))
        yield running
        running.stop()


@pytest.fixture(autouse=True)
def _no_settings_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OBJECTCACHE")]:
        monkeypatch.delenv(name)


def test_the_status_says_what_was_put(operated: Operated) -> None:
    assert operated.engine in operated.admin("engine", "status").stdout
    status = operated.document("engine", "status")
    assert (status["engine"], status["damaged"]) == (operated.engine, 0)
    if operated.engine == "local":
        assert status["objects"] >= N
        assert status["live_bytes"] >= CHUNKS.size
        assert status["allocated_bytes"] >= status["live_bytes"]
        assert status["capacity_bytes"] <= 128 * MIB
        assert sum(one["bytes"] for one in status["extents"]) == status["allocated_bytes"]
        assert {one["slots"] for one in status["extents"]} >= {16, 8}  # 40 chunks: 16, 16, 8
        assert {path["name"] for path in status["paths"]} == {"page_cache", "direct"}
        assert status["device_path"]
        assert status["when_full"] == "evict"


def test_what_an_engine_lacks_is_refused_with_the_one_that_has_it(operated: Operated) -> None:
    if operated.engine == "local":
        pytest.skip("engine local has all of it")
    for arguments in (
        ("fsck",),
        ("pin", "kv", KEYS[0]),
        ("bucket", "policy", "kv", "--ttl", "7d"),
    ):
        result = operated.admin(*arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"engine {operated.engine} " in result.stderr
        assert "local" in result.stderr
    shown = operated.document("bucket", "policy", "kv")
    assert shown["policy"]["durability"] == "sync"


def test_an_engine_without_a_log_takes_no_checkpoint(operated: Operated) -> None:
    result = operated.admin("checkpoint")
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"engine {operated.engine} has no log" in result.stderr


def test_a_policy_is_kept_over_a_restart(operated: Operated) -> None:
    operated.needs_local()
    flags = ("--durability", "async", "--verification", "sampled", "--quota", "64MiB")
    assert operated.admin("bucket", "policy", "kv", *flags, "--ttl", "7d").exit_code == 0
    operated.admin("bucket", "policy", "kv", "--ttl", "none")
    operated.stop()
    operated.start()
    with operated.connect() as client:
        assert client.ask(GetBucket(name="kv"), Bucket).info.policy == BucketPolicy(
            durability=Durability.ASYNC,
            verification=Verification.SAMPLED,
            quota_bytes=64 * MIB,
        )
    operated.admin(
        "bucket", "policy", "kv", "--durability", "sync", "--verification", "full",
        "--quota", "none",
    )  # fmt: skip


def test_pins_count_what_is_stored(operated: Operated) -> None:
    operated.needs_local()
    pinned = operated.document("pin", "kv", *KEYS[:3], "missing")
    assert pinned == {"bucket": "kv", "pinned": True, "asked": 4, "count": 3}
    assert operated.document("unpin", "kv", *KEYS[:3])["count"] == 3


def test_a_check_finds_rot_and_repair_drops_it(operated: Operated) -> None:
    operated.needs_local()
    report = operated.document("fsck")
    assert (report["damaged"], report["misplaced"], report["leaked_bytes"]) == (0, 0, 0)
    assert report["objects"] >= N
    assert report["bytes"] >= CHUNKS.size
    _rot(operated.data_dir / "data", CHUNKS[7, 2].tobytes())
    found = operated.document("fsck", exit_code=1)
    assert (found["damaged"], found["misplaced"], found["dropped"]) == (1, 0, 0)
    assert any(KEYS[7] in example for example in found["examples"])
    repaired = operated.document("fsck", "--repair", exit_code=1)
    assert (repaired["damaged"], repaired["dropped"]) == (1, 1)
    assert operated.document("fsck")["damaged"] == 0


def _rot(folder: Path, slice_bytes: bytes) -> None:
    """Change one byte of a slice where it lies in a data file."""
    for file in sorted(folder.iterdir()):
        position = file.read_bytes().find(slice_bytes)
        if position >= 0:
            with file.open("r+b") as opened:
                opened.seek(position + 100)
                opened.write(bytes([slice_bytes[100] ^ 1]))
                opened.flush()
                os.fsync(opened.fileno())
            return
    raise AssertionError("the slice lies in no data file")
