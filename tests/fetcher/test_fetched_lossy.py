"""Lossy chunks are dequantised by a fetcher's workers, and without one by the client: the same
bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from objectcache import Client, DeliveryFailed
from objectcache.deliveries.fetch_request import FetchRequest
from objectcache.kv_bucket import KvBucket
from objectcache_encodings.decoder import SliceDecoder
from objectcache_encodings.lossy import (
    LOSSY_DTYPES,
    LossyDtype,
    dtype_of_text,
    dtype_text,
    kv_shape,
)
from objectcache_relay.forwarding import PIECE_BYTES_MAX
from objectcache_schemas.errors import InvalidRequest
from tests.encoded_delivery.prefixes import (
    LAYERS,
    LAYOUT,
    SLICE_BYTES,
    ZSTD,
    client_of,
    normal_numbers,
    store_as,
)
from tests.fetcher.fetchers import RunningFetcher
from tests.integration.served import wait_until
from tests.relay.relays import NIXL, RunningRelay
from tests.servers import RunningServer, start_server

CHUNKS = 40  # several jobs a layer
DATA = normal_numbers(CHUNKS, seed=9)
TOKENS = np.arange(CHUNKS * LAYOUT.chunk_tokens)
SHAPE = kv_shape(LAYOUT, heads=8, width=128)
NAMES = sorted(LOSSY_DTYPES)
PATIENT_S = 20.0  # of a fetcher on a busy machine
BOUND_S = 60.0
Bytes = npt.NDArray[np.uint8]


def dtype_of(name: str) -> LossyDtype:
    return LOSSY_DTYPES[name](SHAPE)


def expected_of(lossy: LossyDtype) -> Bytes:
    """uint8[layers, chunks, slice_bytes]: what the SDK makes of what was put."""
    out = np.empty((LAYERS, CHUNKS, SLICE_BYTES), np.uint8)
    for layer in range(LAYERS):
        lossy.dequantise(lossy.quantise(DATA[:, layer], layer), layer, out[layer])
    return out


EXPECTED = {name: expected_of(dtype_of(name)) for name in NAMES}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A bucket for each dtype, of which the first half of the chunks is encoded."""
    settings = ("storage.compaction_bytes_per_s=0",)
    with start_server(tmp_path_factory.mktemp("lossy"), *settings) as running:
        with client_of(running) as client:
            for name in NAMES:
                bucket = bucket_of(client, name, create=True)
                keys = bucket.chunk_keys(TOKENS)
                store_as(running, name, ZSTD)
                bucket.put(keys[: CHUNKS // 2], DATA[: CHUNKS // 2])
                store_as(running, name, None)
                bucket.put(keys[CHUNKS // 2 :], DATA[CHUNKS // 2 :])
        yield running


@pytest.fixture(scope="module", params=["planes-zstd", ""], ids=["encoded", "plain"])
def fetcher(
    server: RunningServer, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[RunningFetcher]:
    log = tmp_path_factory.mktemp("fetcher") / "fetcher.log"
    with RunningFetcher(server, log, f"fetcher.encodings={request.param}") as running:
        yield running


def bucket_of(client: Client, name: str, **options: Any) -> KvBucket:
    return client.kv_bucket(name, LAYOUT, lossy=dtype_of(name), **options)


def through(server: RunningServer, fetcher: RunningRelay, **options: Any) -> Client:
    return client_of(server, fetcher=fetcher.endpoint, relay_timeout_s=PATIENT_S, **options)


def refuse(*_: object) -> None:
    raise AssertionError("the engine's process dequantises")


@pytest.mark.parametrize(
    ("name", "transport"),
    [
        *((name, "auto") for name in NAMES),
        pytest.param(NAMES[0], *NIXL.values, marks=NIXL.marks),
    ],
)
def test_workers_dequantise_on_the_way_to_the_engine_what_the_client_would(
    server: RunningServer,
    fetcher: RunningFetcher,
    name: str,
    transport: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = EXPECTED[name]
    with through(server, fetcher, transport=transport) as client:
        bucket = bucket_of(client, name)
        keys = bucket.chunk_keys(TOKENS)
        monkeypatch.setattr(LossyDtype, "dequantise", refuse)
        for _ in range(2):  # the second one over the session itself
            with bucket.fetch(keys, delivery="layerwise") as delivery:
                for layer, payload in delivery:
                    assert np.array_equal(payload, expected[layer]), layer
                assert delivery.route == "relay:fetcher"
                assert delivery.slice_bytes == SLICE_BYTES
                assert delivery.delivered_bytes == expected.nbytes
                assert delivery.stored_bytes == CHUNKS * LAYERS * dtype_of(name).slice_bytes
        with bucket.fetch(keys[:7], delivery="layerwise", layers=(2, 5)) as delivery:
            assert np.array_equal(delivery.wait(), expected[2:5, :7])
        absent = [*keys[:5], "00" * 32]
        with bucket.fetch(absent, delivery="layerwise", on_missing="truncate") as delivery:
            assert np.array_equal(delivery.wait(), expected[:, :5])


def test_two_layouts_at_once_come_through_little_memory_and_over_a_workers_death(
    server: RunningServer, tmp_path: Path
) -> None:
    names = ("lossy-q4", "lossy-q8")
    stored_bytes = {name: CHUNKS * LAYERS * dtype_of(name).slice_bytes for name in names}
    landing_bytes = max(stored_bytes.values()) * 5 // 6  # layers of six
    settings = ("fetcher.workers=2", f"relay.landing_bytes={landing_bytes}", "relay.hold_s=0")
    with (
        RunningFetcher(server, tmp_path / "fetcher.log", *settings) as fetcher,
        through(server, fetcher) as client,
    ):
        begun = threading.Barrier(len(names) + 1)

        def fetch(name: str) -> str:
            bucket = bucket_of(client, name)
            keys, rate = bucket.chunk_keys(TOKENS), stored_bytes[name] / 1.5
            with bucket.fetch(keys, delivery="layerwise", rate_bytes_per_s=rate) as delivery:
                delivery.wait_layer(0, BOUND_S)
                begun.wait(BOUND_S)
                assert np.array_equal(delivery.wait(BOUND_S), EXPECTED[name]), name
                return delivery.route

        with ThreadPoolExecutor(len(names)) as threads:
            fetches = [threads.submit(fetch, name) for name in names]
            begun.wait(BOUND_S)  # both are under way
            fetcher.workers[0].kill()
            assert [one.result() for one in fetches] == ["relay:fetcher"] * len(names)
        deaths = ("fetcher_worker_deaths_total", "signal 9")
        wait_until(lambda: fetcher.samples().get(deaths, 0) == 1, "the death is noticed")
        decoded = fetcher.decoded_bytes
        assert set(decoded) == {ZSTD, "plain"}
        assert sum(decoded.values()) == sum(stored_bytes.values())  # as they are stored


def test_a_target_of_the_callers_is_filled(server: RunningServer, fetcher: RunningFetcher) -> None:
    expected = EXPECTED["lossy-q8"]
    with through(server, fetcher) as client:
        bucket = bucket_of(client, "lossy-q8")
        target = client.shared_memory_target(expected.nbytes)
        keys = bucket.chunk_keys(TOKENS)
        with bucket.fetch(keys, delivery="layerwise", target=target) as delivery:
            delivery.wait()
        assert np.array_equal(target.array[: expected.nbytes], expected.reshape(-1))


@pytest.mark.parametrize("options", [{"transport": "body"}, {}], ids=["body", "chunkwise"])
def test_what_a_fetcher_cannot_dequantise_the_client_does(
    server: RunningServer, fetcher: RunningFetcher, options: dict[str, str]
) -> None:
    with through(server, fetcher, **options) as client:
        bucket = bucket_of(client, "lossy-q8")
        mode = "layerwise" if options else "chunkwise"
        with bucket.fetch(bucket.chunk_keys(TOKENS), delivery=mode) as delivery:
            assert np.array_equal(delivery.wait(), EXPECTED["lossy-q8"])


def test_a_fetcher_that_dies_leaves_the_rest_to_the_client(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []  # slices, of each row that came encoded to this process
    decode_row = SliceDecoder.decode_row

    def note(decoder: SliceDecoder, row: Bytes, out: Bytes) -> None:
        decoded.append(len(row))
        decode_row(decoder, row, out)

    monkeypatch.setattr(SliceDecoder, "decode_row", note)
    expected = EXPECTED["lossy-q8"]
    with (
        RunningFetcher(server, tmp_path / "fetcher.log") as fetcher,
        through(server, fetcher) as client,
    ):
        bucket = bucket_of(client, "lossy-q8")
        keys = bucket.chunk_keys(TOKENS)
        rate = CHUNKS * dtype_of("lossy-q8").slice_bytes * 4.0  # four layers a second
        with bucket.fetch(keys, delivery="layerwise", rate_bytes_per_s=rate) as delivery:
            assert np.array_equal(delivery.wait_layer(1, BOUND_S), expected[1])
            fetcher.process.kill()
            assert np.array_equal(delivery.wait(BOUND_S), expected)
            assert delivery.route == "direct"
        with bucket.fetch(keys, delivery="layerwise") as delivery:  # nobody listens
            assert np.array_equal(delivery.wait(BOUND_S), expected)
    expected = EXPECTED["lossy-bins"]  # whose slices are shorter as frames
    for encodings, count in ((None, 0), ([ZSTD], LAYERS * CHUNKS // 2)):  # as they are stored
        with through(server, fetcher) as client:  # one that does not know yet
            bucket = bucket_of(client, "lossy-bins")
            keys = bucket.chunk_keys(TOKENS)
            with bucket.fetch(keys, delivery="layerwise", encodings=encodings) as delivery:
                assert np.array_equal(delivery.wait(BOUND_S), expected)
                assert "relay:fetcher refused" in delivery.route_reason
        assert sum(decoded) == count


def test_a_relay_without_workers_refuses_and_the_client_goes_on(
    server: RunningServer, tmp_path: Path
) -> None:
    with (
        RunningRelay(server, tmp_path / "relay.log") as relay,
        through(server, relay) as client,
    ):
        bucket = bucket_of(client, "lossy-q6")
        with bucket.fetch(bucket.chunk_keys(TOKENS), delivery="layerwise") as delivery:
            assert np.array_equal(delivery.wait(BOUND_S), EXPECTED["lossy-q6"])
            assert "only a fetcher dequantises" in delivery.route_reason


def test_a_slice_that_is_none_of_the_dtype_fails_with_its_key(
    server: RunningServer, tmp_path: Path
) -> None:
    lossy = dtype_of("lossy-q8")
    with (
        RunningFetcher(server, tmp_path / "fetcher.log") as fetcher,
        through(server, fetcher) as client,
    ):
        bucket = client.kv_bucket("foreign", LAYOUT, lossy=lossy, create=True)
        keys = bucket.chunk_keys(TOKENS)[:5]
        stored = np.zeros((5, LAYERS, lossy.slice_bytes), np.uint8)
        stored[2, 4] = 0xFF  # scales that are no numbers
        client.kv_bucket("foreign", bucket.layout).put(keys, stored)
        with bucket.fetch(keys, delivery="layerwise") as delivery:
            delivery.wait_layer(3, BOUND_S)
            with pytest.raises(DeliveryFailed, match="no number") as caught:
                delivery.wait_layer(4, BOUND_S)
            assert caught.value.details.layer == 4
            assert keys[2] in caught.value.message
            assert keys[2] in delivery.route_reason
            assert "could not be decoded" not in delivery.route_reason


def test_a_damaged_slice_that_is_a_piece_by_itself_has_its_own_key(
    server: RunningServer, tmp_path: Path
) -> None:
    tokens = 2048
    layout = msgspec.structs.replace(
        LAYOUT,
        num_layers=1,
        chunk_tokens=tokens,
        per_layer_chunk_bytes=tokens * SLICE_BYTES // LAYOUT.chunk_tokens,
    )
    lossy = LOSSY_DTYPES["lossy-q8"](kv_shape(layout, heads=8, width=128))
    assert 2 * lossy.slice_bytes > PIECE_BYTES_MAX
    with (
        RunningFetcher(server, tmp_path / "fetcher.log") as fetcher,
        through(server, fetcher) as client,
    ):
        bucket = client.kv_bucket("large-slices", layout, lossy=lossy, create=True)
        keys = bucket.chunk_keys(np.arange(3 * tokens))
        stored = np.zeros((3, 1, lossy.slice_bytes), np.uint8)
        stored[2] = 0xFF  # scales that are no numbers
        client.kv_bucket("large-slices", bucket.layout).put(keys, stored)
        with bucket.fetch(keys, delivery="layerwise") as delivery:
            with pytest.raises(DeliveryFailed, match="no number"):
                delivery.wait(BOUND_S)
            assert keys[2] in delivery.route_reason
        with bucket.fetch(keys[:2], delivery="layerwise") as delivery:
            assert not (delivery.wait(BOUND_S) & 0x7F).any()  # zeros, of either sign
            assert delivery.route == "relay:fetcher"


@pytest.mark.parametrize("name", NAMES)
def test_a_dtype_is_one_line_of_text_and_back(name: str) -> None:
    text = dtype_text(dtype_of(name))
    assert text == f"{name};bfloat16;2x4x8x128"
    again = dtype_of_text(text, "dequantise")
    assert (again.name, again.shape) == (name, SHAPE)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "NAME;NUMBERS"),
        ("lossy-q8", "NAME;NUMBERS"),
        ("q8;bfloat16;2x4x8x128", "NAME;NUMBERS"),
        ("lossy-q8;fp8;2x4x8x128", "numbers must be one of"),
        ("lossy-q8;bfloat16;2x4x8", "NAME;NUMBERS"),
        ("lossy-q8;bfloat16;2x04x8x128", "is written 'lossy-q8;bfloat16;2x4x8x128'"),
        ("lossy-q8;bfloat16;2x4x8x1000000", "width must be from 1 to 65536"),
        ("lossy-q8;bfloat16;2x4x8x-128", "width must be"),
        ("lossy-q4;bfloat16;2x4x8x127", "an even width"),
        ("lossy-bins;bfloat16;2x1x4096x65536", "heads x width must be 1048576 at most"),
        ("lossy-q8;float32;2x65536x1x65536", "bytes of a slice must be 1073741824 at most"),
        ("lossy-q8;bfloat16;" + "9" * 5000, "NAME;NUMBERS"),
        ("a" * 5000, "NAME;NUMBERS"),
    ],
)
def test_another_text_is_refused_by_what_it_came_in(text: str, word: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        dtype_of_text(text, "dequantise")
    assert caught.value.message.startswith("dequantise")
    assert word in caught.value.message
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("lossy-q8;bfloat16;2x65536x4096x65536", "heads x width"),
        ("lossy-q8;bfloat16;2x4x8x64", "are of"),  # of other slices
        ("~" * 100, "NAME;NUMBERS"),
    ],
)
def test_a_fetcher_that_is_told_nonsense_says_so_and_the_client_has_the_rest(
    server: RunningServer,
    fetcher: RunningFetcher,
    text: str,
    word: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = EXPECTED["lossy-q8"]
    for good_before in (False, True):  # by a request, and over the session
        with through(server, fetcher) as client:
            bucket = bucket_of(client, "lossy-q8")
            keys = bucket.chunk_keys(TOKENS)
            if good_before:
                with bucket.fetch(keys, delivery="layerwise") as delivery:
                    delivery.wait(BOUND_S)
            with monkeypatch.context() as patched:
                patched.setattr(FetchRequest, "dequantise", property(lambda _: text))
                with bucket.fetch(keys, delivery="layerwise") as delivery:
                    assert np.array_equal(delivery.wait(BOUND_S), expected)
                    assert "dequantise" in delivery.route_reason
                    assert word in delivery.route_reason
    assert fetcher.process.returncode is None
