"""Chunks that are stored encoded come as they are stored, and are decoded by the workers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from objectcache import Client, DeliveryFailed
from objectcache_encodings.frames import SliceCodec
from objectcache_encodings.payload_directory import PayloadDirectory
from objectcache_schemas.errors import DamagedData
from objectcache_schemas.records import Verification
from tests.encoded_delivery.prefixes import (
    BUCKET,
    CHUNKS,
    DATA,
    DEFLATE,
    KEYS,
    LAYERS,
    LAYOUT,
    PUTS,
    SLICE_BYTES,
    ZSTD,
    client_of,
    fill,
)
from tests.encoded_delivery.test_rotten_frames import CHUNK as ROTTEN
from tests.encoded_delivery.test_rotten_frames import COUNT, rot, store
from tests.fetcher.fetchers import RunningFetcher
from tests.integration.served import wait_until
from tests.relay.relays import NIXL
from tests.servers import RunningServer, start_server

BOUND_S = 30.0


@pytest.fixture(scope="module")
def encoded_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    # Else all chunks would soon be stored as the last of them.
    settings = ("storage.nixl=trusting", "storage.compaction_bytes_per_s=0")
    with start_server(tmp_path_factory.mktemp("encoded"), *settings) as running:
        with client_of(running) as client:
            fill(running, client)
        yield running


def decoded_bytes(*encodings: str | None) -> int:
    """Of the chunks that are stored so."""
    return sum(count for count, encoding in PUTS if encoding in encodings) * LAYOUT.chunk_bytes


def check(client: Client, first: int = 0, end: int = LAYERS) -> None:
    bucket = client.kv_bucket(BUCKET, LAYOUT)
    with bucket.fetch(KEYS, delivery="layerwise", layers=(first, end)) as delivery:
        for layer, payload in delivery:
            assert np.array_equal(payload, DATA[:, layer]), f"layer {layer}"


@pytest.mark.parametrize(
    ("upstream", "transport"),
    [
        ("shared_memory", "shared_memory"),
        ("body", "shared_memory"),
        ("body", "body"),
        pytest.param("shared_memory", *NIXL.values, marks=NIXL.marks),
    ],
)
def test_a_mixed_prefix_is_decoded_on_its_way_to_the_engine(
    encoded_server: RunningServer, tmp_path: Path, upstream: str, transport: str
) -> None:
    settings = (f"relay.transport={upstream}", "relay.hold_s=0")
    with (
        RunningFetcher(encoded_server, tmp_path / "fetcher.log", *settings) as fetcher,
        fetcher.client(transport) as client,
    ):
        for _ in range(2):  # the second one over the session itself
            check(client)
        expected = {
            "planes-zstd": 2 * decoded_bytes(ZSTD),
            "planes-deflate": 2 * decoded_bytes(DEFLATE),
            "plain": 2 * decoded_bytes(None),
        }
        assert fetcher.decoded_bytes == expected
        samples = fetcher.samples()
        for encoding in (ZSTD, DEFLATE):
            wire = samples["fetcher_wire_bytes_total", encoding]
            assert 0.5 < wire / expected[encoding] < 0.75
        check(client, 2, 5)
        assert sum(fetcher.decoded_bytes.values()) == 2 * DATA.nbytes + DATA[:, 2:5].nbytes


@pytest.mark.parametrize(
    ("encodings", "expected"),
    [("", {"plain": DATA.nbytes}), (ZSTD, None), (DEFLATE, None)],
)
def test_what_is_not_asked_for_encoded_is_decoded_by_the_server(
    encoded_server: RunningServer,
    tmp_path: Path,
    encodings: str,
    expected: dict[str, float] | None,
) -> None:
    with (
        RunningFetcher(
            encoded_server, tmp_path / "fetcher.log", f"fetcher.encodings={encodings}"
        ) as fetcher,
        fetcher.client("shared_memory") as client,
    ):
        check(client)
        if expected is None:
            of_it = decoded_bytes(encodings)
            expected = {encodings: of_it, "plain": DATA.nbytes - of_it}
        assert fetcher.decoded_bytes == expected


def test_engines_that_ask_for_the_same_share_what_has_landed(
    encoded_server: RunningServer, tmp_path: Path
) -> None:
    with (
        RunningFetcher(encoded_server, tmp_path / "fetcher.log", "relay.hold_s=60") as fetcher,
        fetcher.client("shared_memory") as one,
        fetcher.client("shared_memory") as other,
        ThreadPoolExecutor(2) as threads,
    ):
        list(threads.map(check, (one, other)))
        check(other, 3, 4)
        assert fetcher.samples()["claims_total", "hit"] >= 1
        assert sum(fetcher.decoded_bytes.values()) == 2 * DATA.nbytes + DATA[:, 3].nbytes


def test_chunks_of_less_than_the_whole_prefix_and_parts_of_it_are_decoded(
    encoded_server: RunningServer, tmp_path: Path
) -> None:
    with (
        RunningFetcher(encoded_server, tmp_path / "fetcher.log") as fetcher,
        RunningFetcher(encoded_server, tmp_path / "second.log") as second,
        fetcher.client("shared_memory") as client,
    ):
        bucket = client.kv_bucket(BUCKET, LAYOUT)
        keys = [*KEYS[:7], "0" * 64, *KEYS[7:]]
        with bucket.fetch(keys, delivery="layerwise", on_missing="truncate") as delivery:
            assert delivery.chunk_count == 7
            assert np.array_equal(delivery.wait(), DATA[:7].transpose(1, 0, 2))
        parts = client_of(
            encoded_server,
            relays=[f"a={fetcher.endpoint}", f"b={second.endpoint}"],
            route="split",
        )
        with parts:
            divided = parts.kv_bucket(BUCKET, LAYOUT)
            for _ in range(4):
                with divided.fetch(KEYS, delivery="layerwise") as delivery:
                    assert np.array_equal(delivery.wait(BOUND_S), DATA.transpose(1, 0, 2))
        assert fetcher.decoded_bytes.get(ZSTD) or second.decoded_bytes.get(ZSTD)


def change_byte_of_newest_layer(fetcher: RunningFetcher) -> tuple[int, int]:
    """Where the prefix has landed, in the last layer that has: its chunk, and the layer."""
    for descriptor in fetcher.memory_files():
        landed = os.pread(descriptor, DATA.nbytes, 0)
        directory = directory_in(landed)
        if directory is None:
            continue
        there = [
            layer
            for layer in range(LAYERS)
            if any(landed[slice(*directory.layer_offsets[layer : layer + 2])][-1000:])
        ]
        layer = there[-2]  # the last may have landed in part
        row = next(one for one in directory.rows(layer) if one.codec is SliceCodec.PLANES_DEFLATE)
        place = row.offset_bytes + 2 * row.pitch_bytes + 100
        os.pwrite(descriptor, bytes([landed[place] ^ 1]), place)
        return row.first_chunk + 2, layer
    raise AssertionError("it has landed nowhere")


def directory_in(landed: bytes) -> PayloadDirectory | None:
    for length in range(64, 4096, 64):
        try:
            return PayloadDirectory.from_bytes(
                landed[:length], chunk_count=CHUNKS, layer_count=LAYERS, slice_bytes=SLICE_BYTES
            )
        except DamagedData:
            continue
    return None


def test_a_byte_that_changes_fails_its_delivery_with_the_chunk_and_no_other(
    encoded_server: RunningServer, tmp_path: Path
) -> None:
    with (
        RunningFetcher(encoded_server, tmp_path / "fetcher.log", "relay.hold_s=0") as fetcher,
        fetcher.client("shared_memory") as client,
        fetcher.client("shared_memory") as other,
    ):
        bucket = client.kv_bucket(BUCKET, LAYOUT)
        for worker in fetcher.workers:
            worker.suspend()
        with bucket.fetch(KEYS, delivery="layerwise") as delivery:
            fetcher.wait_queued(DATA.nbytes)
            chunk, layer = change_byte_of_newest_layer(fetcher)
            for worker in fetcher.workers:
                worker.resume()
            with pytest.raises(DeliveryFailed) as caught:
                delivery.wait(BOUND_S)
            # The other worker may still be at an earlier layer.
            missing = caught.value.details.layer
            assert missing is not None
            assert missing <= layer
            assert KEYS[chunk] in str(caught.value)
            # The session says so, unless the outcome over HTTP is there first, which names it.
            cause = caught.value.__cause__
            assert isinstance(cause, DamagedData) or "DamagedData: chunk" in str(cause)
            for there in range(missing):
                assert np.array_equal(delivery.ready_layer(there), DATA[:, there])
            check(other)
        check(client)
        assert fetcher.samples()["deliveries_total", "DamagedData"] == 1
        log = tmp_path / "fetcher.log"
        wait_until(
            lambda: f"{KEYS[chunk]} was damaged here, and is whole" in log.read_text(),
            "the chunk was looked at",
        )
        assert bucket.match(KEYS) == CHUNKS


def test_a_chunk_that_is_damaged_where_it_is_stored_is_dropped_there(tmp_path: Path) -> None:
    with start_server(tmp_path / "store", "storage.compaction_bytes_per_s=0") as server:
        store(server, Verification.OFF)
        rot(server, 3)
        with (
            RunningFetcher(server, tmp_path / "fetcher.log") as fetcher,
            fetcher.client("shared_memory") as client,
        ):
            bucket = client.kv_bucket(BUCKET, LAYOUT)
            with (
                bucket.fetch(KEYS[:COUNT], delivery="layerwise") as delivery,
                pytest.raises(DeliveryFailed, match=KEYS[ROTTEN]) as caught,
            ):
                delivery.wait(BOUND_S)
            assert caught.value.details.layer in range(4)
            wait_until(lambda: bucket.match(KEYS[:COUNT]) == ROTTEN, "it was dropped")


def test_a_client_has_what_was_damaged_in_the_fetcher_directly(
    encoded_server: RunningServer, tmp_path: Path
) -> None:
    with (
        RunningFetcher(encoded_server, tmp_path / "fetcher.log", "relay.hold_s=0") as fetcher,
        client_of(
            encoded_server,
            fetcher=fetcher.endpoint,
            relay_timeout_s=20.0,
        ) as client,
    ):
        bucket = client.kv_bucket(BUCKET, LAYOUT)
        for worker in fetcher.workers:
            worker.suspend()
        with bucket.fetch(KEYS, delivery="layerwise") as delivery:
            fetcher.wait_queued(DATA.nbytes)
            change_byte_of_newest_layer(fetcher)
            for worker in fetcher.workers:
                worker.resume()
            assert np.array_equal(delivery.wait(BOUND_S), DATA.transpose(1, 0, 2))
            assert delivery.route == "direct"
            assert "could not be decoded" in delivery.route_reason
