"""Frames that rot where they are stored, or pass a server that does not look."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from objectcache import DeliveryFailed
from objectcache_encodings import SliceEncoder
from objectcache_schemas.messages.buckets import SetPolicy
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.records import BucketPolicy, StoredEncoding, Verification
from tests.encoded_delivery.prefixes import BUCKET, DATA, KEYS, LAYOUT, ZSTD, client_of
from tests.integration.served import wait_until
from tests.servers import RunningServer, start_server
from tests.storage_client import StorageClient

COUNT, CHUNK = 5, 2  # of an extent, and the chunk in it that rots


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RunningServer]:
    settings = ("storage.compaction_bytes_per_s=0",)  # it stays where it is changed
    with start_server(tmp_path / "server", *settings) as running:
        yield running


def store(server: RunningServer, verification: Verification) -> None:
    policy = BucketPolicy(encoding=StoredEncoding.PLANES_ZSTD, verification=verification)
    with client_of(server) as client, StorageClient(server.run_dir / "storage.sock") as storage:
        bucket = client.kv_bucket(BUCKET, LAYOUT, create=True)
        storage.ask(SetPolicy(bucket=BUCKET, policy=policy), Done)
        bucket.put(KEYS[:COUNT], DATA[:COUNT])


def rot(server: RunningServer, layer: int) -> None:
    """Change a byte of a frame where it lies in a data file."""
    frame = SliceEncoder(ZSTD, 2).encode_slice(DATA[CHUNK, layer])
    for file in sorted((server.data_dir / "data").iterdir()):
        position = file.read_bytes().find(frame[16:144])
        if position >= 0:
            with file.open("r+b") as opened:
                opened.seek(position + 100)
                opened.write(bytes([frame[116] ^ 1]))
                opened.flush()
                os.fsync(opened.fileno())
            return
    raise AssertionError("the frame lies in no data file")


@pytest.mark.parametrize("transport", ["body", "shared_memory"])
@pytest.mark.parametrize("layer", [0, 3])
def test_a_rotten_frame_is_found_before_its_layer_is_announced(
    own_server: RunningServer, transport: str, layer: int
) -> None:
    store(own_server, Verification.FULL)
    rot(own_server, layer)
    with client_of(own_server, transport=transport, encodings=[ZSTD]) as client:
        bucket = client.kv_bucket(BUCKET, LAYOUT)
        with bucket.fetch(KEYS[:COUNT], delivery="layerwise") as delivery:
            assert delivery.is_encoded
            with pytest.raises(DeliveryFailed) as caught:
                delivery.wait()
            assert "is damaged: chunk" not in str(caught.value)  # not what the client finds
            arrived = [time_s is not None for time_s in delivery.arrivals_s]
            assert not any(arrived[layer:])
            for number, has_come in enumerate(arrived):
                if has_come:
                    assert np.array_equal(delivery.wait_layer(number), DATA[:COUNT, number])
        wait_until(lambda: bucket.match(KEYS[:COUNT]) == CHUNK, "it was dropped")


@pytest.mark.parametrize("transport", ["body", "shared_memory"])
def test_what_the_server_does_not_look_at_is_found_by_the_reader(
    own_server: RunningServer, transport: str
) -> None:
    store(own_server, Verification.OFF)
    rot(own_server, 3)
    with client_of(own_server, transport=transport, encodings=[ZSTD]) as client:
        bucket = client.kv_bucket(BUCKET, LAYOUT)
        with bucket.fetch(KEYS[:COUNT], delivery="layerwise") as delivery:
            for layer in range(3):
                assert np.array_equal(delivery.wait_layer(layer), DATA[:COUNT, layer])
            with pytest.raises(DeliveryFailed, match="layer 3 is damaged: chunk 2") as caught:
                delivery.wait_layer(3)
            assert caught.value.details.key == KEYS[CHUNK]
        # The client has the server decode it, which drops it.
        wait_until(lambda: bucket.match(KEYS[:COUNT]) == CHUNK, "it was dropped")
