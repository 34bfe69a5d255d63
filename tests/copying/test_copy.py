"""`objectcache admin copy` between a local engine and a store that two servers share."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from objectcache_schemas.layout import KvLayout
from objectcache_schemas.messages.buckets import SetPolicy
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.records import BucketPolicy, StoredEncoding
from tests.integration.fleet import ROOT, RunningFleet
from tests.integration.served import own_environment, wait_until
from tests.integration.test_admin_of_several_servers import FleetAdmin
from tests.integration.test_shared_store import shared_fleet
from tests.storage_client import StorageClient

LAYOUT = KvLayout(
    num_layers=4, chunk_tokens=16, per_layer_chunk_bytes=16 << 10, dtype="uint8", fingerprint="t"
)
PUT_COUNT, CHUNKS_EACH = 60, 4
CHUNK_COUNT = PUT_COUNT * CHUNKS_EACH
DELETED_COUNT = 60
KEYS = LAYOUT.chunk_keys(np.arange(CHUNK_COUNT * 16, dtype=np.uint32))
CHUNKS = np.random.default_rng(3).integers(0, 256, (CHUNK_COUNT, 4, 16 << 10), dtype=np.uint8)
BUCKET = "kvs"


@pytest.fixture
def local(tmp_path: Path) -> Iterator[RunningFleet]:
    """One server with the default engine, and the chunks of many puts, half of them encoded."""
    with RunningFleet(tmp_path / "local", 1) as running, running.client() as client:
        bucket = client.kv_bucket(BUCKET, LAYOUT, create=True)
        for start in range(0, CHUNK_COUNT, CHUNKS_EACH):
            if start == CHUNK_COUNT // 2:
                policy = BucketPolicy(encoding=StoredEncoding.PLANES_ZSTD)
                with StorageClient(running.servers[0].run_dir / "storage.sock") as storage:
                    storage.ask(SetPolicy(bucket=BUCKET, policy=policy), Done)
            bucket.put(KEYS[start : start + CHUNKS_EACH], CHUNKS[start : start + CHUNKS_EACH])
        yield running


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[RunningFleet]:
    (tmp_path / "shared").mkdir()
    with shared_fleet(tmp_path / "shared", 2) as running:
        yield running


# The command, which copies the first puts and then none until it is interrupted: however quick it
# is, and however slow who interrupts it.
HALTING = """
import itertools, runpy, threading
from objectcache_operations.admin.copying import copy_chunks

batches = copy_chunks.batches

def first_batches(*of):
    yield from itertools.islice(batches(*of), 10)
    threading.Event().wait()

copy_chunks.batches = first_batches
runpy.run_module("objectcache_operations", run_name="__main__")
"""


def command(
    source: RunningFleet,
    target: RunningFleet,
    *more: str,
    run: Sequence[str] = ("-m", "objectcache_operations"),
) -> Sequence[str]:
    return (
        *(sys.executable, *run, "admin", "copy", *more),
        *("--from", source.endpoint, "--to", target.endpoint),
    )


KEY_PAIR = {"OBJECTCACHE_ACCESS_KEY": ROOT.access_key, "OBJECTCACHE_SECRET_KEY": ROOT.secret_key}


def ran(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, capture_output=True, text=True, check=False, env=own_environment() | KEY_PAIR
    )


def told(words: Sequence[str]) -> Any:
    """The one bucket of what the command prints for programs."""
    done = ran((*words, "--json"))
    assert done.returncode == 0, done.stderr
    (bucket,) = json.loads(done.stdout)["buckets"]
    return bucket


def stored(fleet: RunningFleet) -> dict[str, str]:
    """ETags by key."""
    pages = fleet.s3().get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
    return {one["Key"]: one["ETag"] for page in pages for one in page.get("Contents", ())}


def buckets(fleet: RunningFleet) -> list[str]:
    return [one["Name"] for one in fleet.s3().list_buckets()["Buckets"]]


def check_all(fleet: RunningFleet) -> None:
    with fleet.client() as client:
        bucket = client.kv_bucket(BUCKET, LAYOUT)
        wait_until(lambda: bucket.match(KEYS) == CHUNK_COUNT, "the chunks to be replayed")
        with bucket.fetch(KEYS) as delivery:
            for layer in range(LAYOUT.num_layers):
                assert np.array_equal(delivery.wait_layer(layer), CHUNKS[:, layer])


def test_a_bucket_goes_to_a_shared_store_in_two_runs_and_back(
    local: RunningFleet, shared: RunningFleet
) -> None:
    there = command(local, shared, BUCKET)
    dry = told((*there, "--dry-run"))
    assert dry["source"]["count"] == CHUNK_COUNT
    assert dry["copied"]["count"] == 0
    assert BUCKET not in buckets(shared)

    halting = command(local, shared, BUCKET, run=("-c", HALTING))
    first = subprocess.Popen(halting, env=own_environment() | KEY_PAIR, stderr=subprocess.PIPE)
    try:
        wait_until(lambda: BUCKET in buckets(shared) and bool(stored(shared)), "the first chunks")
        first.send_signal(signal.SIGINT)
        _, said = first.communicate(timeout=60)
    finally:
        first.kill()
    assert first.returncode == 130, said
    assert b"goes on" in said
    held = len(stored(shared))
    assert 0 < held < CHUNK_COUNT

    second = told(there)
    there_count = second["there"]["count"]
    assert held <= there_count < CHUNK_COUNT  # a put that was under way may have arrived since
    assert second["copied"]["count"] == CHUNK_COUNT - there_count
    assert second["arrived"] == {"count": CHUNK_COUNT, "size_bytes": CHUNKS.nbytes}
    assert second["is_whole"]
    check_all(shared)
    assert stored(shared) == stored(local)

    with local.client() as client:
        bucket = client.kv_bucket(BUCKET, LAYOUT)
        for key in KEYS[:DELETED_COUNT]:
            bucket.delete(key)
    back = ran(command(shared, local, BUCKET))
    assert back.returncode == 0, back.stderr
    assert f"{DELETED_COUNT} copied, {CHUNK_COUNT - DELETED_COUNT} were there" in back.stdout
    assert f"has all {CHUNK_COUNT} of {CHUNK_COUNT}" in back.stdout
    check_all(local)


def test_a_users_bucket_follows_its_backup(
    local: RunningFleet, shared: RunningFleet, tmp_path: Path
) -> None:
    ours, theirs = FleetAdmin(local), FleetAdmin(shared)
    ours.told("user", "add", "alice")
    layout = ("--layers", "4", "--chunk-tokens", "16", "--slice-bytes", "16384")
    named = ("--dtype", "uint8", "--fingerprint", "t", "--owner", "alice")
    ours.told("bucket", "create", "hers", *layout, *named)
    ours.told("bucket", "policy", "hers", "--ttl", "7d")
    with local.client() as client:
        client.kv_bucket("hers", LAYOUT).put(KEYS[:8], CHUNKS[:8])
    (tmp_path / "passphrase").write_text("a passphrase")
    sealed = (str(tmp_path / "backup"), "--passphrase-file", str(tmp_path / "passphrase"))
    ours.told("backup", *sealed)
    assert theirs.told("restore", *sealed)["buckets_plain"] == [BUCKET]  # the other has none

    copied = told(command(local, shared, "hers"))
    assert copied["copied"]["count"] == 8
    assert copied["is_whole"]
    kept = theirs.told("bucket", "show", "hers")
    assert (kept["owner"], kept["policy"]["ttl_s"]) == ("alice", 7 * 86_400)
    with shared.client() as client:
        bucket = client.kv_bucket("hers", LAYOUT)
        wait_until(lambda: bucket.match(KEYS[:8]) == 8, "the chunks to be replayed")


def test_what_cannot_be_copied_is_refused_in_words(
    local: RunningFleet, shared: RunningFleet
) -> None:
    local.s3().create_bucket(Bucket="plain")
    plain = ran(command(local, shared, "plain"))
    assert plain.returncode == 2
    assert "rclone" in plain.stderr
    assert "plain" not in buckets(shared)

    nowhere = ran(command(local, shared, "nowhere"))
    assert nowhere.returncode == 2
    assert "nowhere" in nowhere.stderr

    with shared.client() as client:
        bucket = client.kv_bucket(BUCKET, LAYOUT, create=True)
        bucket.put(KEYS[:1], CHUNKS[1:2])
    other_bytes = ran(command(local, shared, BUCKET))
    assert other_bytes.returncode == 2
    assert KEYS[0] in other_bytes.stderr

    denied = subprocess.run(
        command(local, shared, BUCKET),
        capture_output=True,
        text=True,
        check=False,
        env=own_environment() | KEY_PAIR | {"OBJECTCACHE_SECRET_KEY": "another-secret-key"},
    )
    assert denied.returncode == 2
    assert "signature" in denied.stderr.lower()
