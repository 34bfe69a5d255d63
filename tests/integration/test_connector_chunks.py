"""A connector's lookups and puts against a real server: what is stored stays, holes are filled."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from objectcache import Client, Conflict, KvLayout, Unavailable
from objectcache.connectors.store import stored_chunks
from objectcache.connectors.store.open_bucket import open_bucket
from objectcache.connectors.store.stored_chunks import match_prefix, put_absent, put_chunks_absent
from objectcache.kv_bucket import KvBucket
from tests.servers import RunningServer, standing_still, start_server

COUNT = 9
SLICE_BYTES = 64
LAYOUT = KvLayout(
    num_layers=2, chunk_tokens=1, per_layer_chunk_bytes=SLICE_BYTES, dtype="u8", fingerprint="c"
)


def client_of(server: RunningServer, **options: Any) -> Client:
    keys = server.credentials
    return Client(
        server.endpoint, access_key=keys.access_key, secret_key=keys.secret_key, **options
    )


@pytest.fixture
def bucket(server: RunningServer) -> Iterator[KvBucket]:
    with client_of(server) as client:
        yield open_bucket(client, f"chunks-{secrets.token_hex(6)}", LAYOUT)


def chunks_of(seed: int, count: int = COUNT) -> Any:
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (count, 2, SLICE_BYTES), np.uint8)


def contents(bucket: KvBucket, keys: list[str]) -> Any:
    with bucket.fetch(keys, delivery="chunkwise") as delivery:
        return delivery.wait().transpose(1, 0, 2).copy()


KEYS = [f"model/{index}" for index in range(COUNT)]


@pytest.mark.parametrize(
    "stored",
    [[], [0], [COUNT - 1], [4], [0, 1, 2, 3], [0, 1, 2, 3, 4, 6, 7, 8], [1, 3, 5, 7], range(COUNT)],
    ids=str,
)
def test_chunks_that_are_stored_in_other_bytes_stay_and_the_others_are_stored(
    bucket: KvBucket, stored: list[int]
) -> None:
    first, second = chunks_of(1), chunks_of(2)
    for index in stored:
        bucket.put(KEYS[index : index + 1], first[index : index + 1])
    assert put_chunks_absent(bucket, KEYS, second) == COUNT - len(stored)
    expected = second.copy()
    expected[list(stored)] = first[list(stored)]
    assert np.array_equal(contents(bucket, KEYS), expected)
    assert put_chunks_absent(bucket, KEYS, second) == 0


def test_each_part_of_a_run_is_stored_behind_the_chunk_before_it(bucket: KvBucket) -> None:
    bucket.put([KEYS[3]], chunks_of(1, 1))
    chunks, asked = chunks_of(2), list[tuple[int, int, str | None]]()

    def put(begin: int, end: int, parent: str | None) -> int:
        asked.append((begin, end, parent))
        return bucket.put(KEYS[begin:end], chunks[begin:end], parent_key=parent).stored

    assert put_absent(bucket, KEYS, put, "model/before") == COUNT - 1
    parents = {begin: parent for begin, _, parent in asked}
    assert parents.pop(0) == "model/before"
    assert parents == {begin: KEYS[begin - 1] for begin in parents}


def test_a_conflict_that_is_not_of_bytes_is_raised(bucket: KvBucket) -> None:
    def put(begin: int, end: int, parent: str | None) -> int:
        raise Conflict("somebody else", code="OperationAborted")

    with pytest.raises(Conflict, match="somebody else"):
        put_absent(bucket, KEYS, put)


def test_a_prefix_longer_than_a_request_is_matched_in_parts(
    bucket: KvBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put(KEYS[:7], chunks_of(1, 7))
    for most in (2, 3, 7, COUNT):
        monkeypatch.setattr(stored_chunks, "MATCH_KEYS_MAX", most)
        assert match_prefix(bucket, KEYS) == 7
        assert match_prefix(bucket, KEYS[:6]) == 6
        assert match_prefix(bucket, KEYS[8:]) == 0
    assert match_prefix(bucket, []) == 0


def test_more_keys_than_a_request_may_have_are_looked_up(bucket: KvBucket) -> None:
    long = [f"{'model' * 12}/{'0' * 32}/0/{index:064x}" for index in range(70_000)]
    bucket.put(long[:1], chunks_of(1, 1))
    assert match_prefix(bucket, long) == 1
    assert match_prefix(bucket, long[:1] * 70_000) == 70_000


def test_a_server_that_is_stopped_ends_a_lookup_by_its_own_timeout(tmp_path: Path) -> None:
    with start_server(tmp_path / "data") as running, client_of(running, timeout_s=600.0) as client:
        bucket = open_bucket(client, "stopped", LAYOUT)
        for pid in (running.storage_pid, running.gateway_pid):
            with standing_still(pid), pytest.raises(Unavailable):
                match_prefix(bucket, KEYS, timeout_s=0.2)
        assert match_prefix(bucket, KEYS) == 0
