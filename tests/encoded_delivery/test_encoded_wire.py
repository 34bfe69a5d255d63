"""What a client in another language sees: headers, the directory, frames; and undecoded layers."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from objectcache.core import TransportChoice
from objectcache.deliveries.fetch_request import FetchRequest
from objectcache.deliveries.fetching import fetch
from objectcache.landing.targets import Target
from objectcache_encodings import SliceCodec, SliceDecoder
from objectcache_encodings.payload_directory import PayloadDirectory
from objectcache_schemas.descriptor import DeliveryMode, Descriptor
from objectcache_schemas.operators.traces import GetTraces, Traces
from tests.encoded_delivery.prefixes import (
    BUCKET,
    CHUNKS,
    DATA,
    KEYS,
    LAYERS,
    LAYOUT,
    SLICE_BYTES,
    ZSTD,
    client_of,
)
from tests.s3_clients import Answer, call
from tests.servers import RunningServer
from tests.storage_client import StorageClient

ASKED = Descriptor(tuple(KEYS), LAYERS, LAYOUT.chunk_tokens, SLICE_BYTES, DeliveryMode.LAYERWISE)


def post(server: RunningServer, descriptor: bytes) -> Answer:
    return call(server, "POST", f"/{BUCKET}?kv-get", descriptor)


def test_a_body_is_a_directory_and_the_layers_that_it_describes(server: RunningServer) -> None:
    answer = post(server, replace(ASKED, encodings=("later-codec", ZSTD)).to_bytes())
    assert answer.status == 200
    directory_bytes = int(answer.headers["x-objectcache-directory-bytes"])
    directory = PayloadDirectory.from_bytes(
        answer.body[:directory_bytes],
        chunk_count=CHUNKS,
        layer_count=LAYERS,
        slice_bytes=SLICE_BYTES,
    )
    assert len(answer.body) == directory.payload_bytes < DATA.nbytes
    assert [(run.chunk_count, run.codec) for run in directory.runs] == [
        (5, SliceCodec.PLANES_ZSTD),
        (1, SliceCodec.PLANES_ZSTD),
        (8, SliceCodec.PLAIN),
        (3, SliceCodec.PLANES_ZSTD),
    ]
    mean_bytes = int(answer.headers["x-objectcache-layer-bytes"])
    assert mean_bytes == directory.payload_bytes // LAYERS
    out = np.empty((CHUNKS, SLICE_BYTES), np.uint8)
    for layer, (begin, end) in enumerate(pairwise(directory.layer_offsets)):
        directory.decode_layer(layer, memoryview(answer.body)[begin:end], out, SliceDecoder())
        assert np.array_equal(out, DATA[:, layer])


@pytest.mark.parametrize("encodings", [None, (), ("later-codec",), ("planes-deflat",)])
def test_who_takes_nothing_that_the_server_knows_gets_plain_bytes(
    server: RunningServer, encodings: tuple[str, ...] | None
) -> None:
    answer = post(server, replace(ASKED, encodings=encodings).to_bytes())
    assert "x-objectcache-directory-bytes" not in answer.headers
    assert answer.headers["x-objectcache-layer-bytes"] == str(CHUNKS * SLICE_BYTES)
    assert answer.body == DATA.transpose(1, 0, 2).tobytes()


def test_a_part_of_a_prefix_is_plain(server: RunningServer) -> None:
    part = replace(ASKED, encodings=(ZSTD,), part=(0, CHUNKS + 1))
    assert post(server, part.to_bytes()).body == DATA.transpose(1, 0, 2).tobytes()


def test_a_list_that_is_too_long_or_no_list_of_names_is_refused(server: RunningServer) -> None:
    wire = msgspec.msgpack.decode(ASKED.to_bytes())
    for encodings in (["a"] * 17, [""], ["a b"], ["x" * 65], "planes-zstd", [7]):
        answer = post(server, msgspec.msgpack.encode({**wire, "encodings": encodings}))
        assert (answer.status, b"InvalidDescriptor" in answer.body) == (400, True), encodings
        assert b"encodings" in answer.body
    assert post(server, msgspec.msgpack.encode({**wire, "encodings": ["a"] * 16})).status == 200


def test_a_put_has_no_encodings(server: RunningServer) -> None:
    head = replace(ASKED, encodings=(ZSTD,)).to_bytes()
    body = len(head).to_bytes(4, "big") + head + DATA.transpose(1, 0, 2).tobytes()
    answer = call(server, "POST", f"/{BUCKET}?kv-put", body)
    assert (answer.status, b"encodings must be nil" in answer.body) == (400, True)


def test_a_trace_has_what_was_sent_and_what_that_is_decoded(server: RunningServer) -> None:
    answer = post(server, replace(ASKED, encodings=(ZSTD,)).to_bytes())
    request_id = answer.headers["x-objectcache-request-id"]
    with StorageClient(server.run_dir / "storage.sock") as storage:
        (trace,) = storage.ask(GetTraces(request_id=request_id), Traces).traces
    assert (trace.payload_bytes, trace.decoded_bytes) == (len(answer.body), DATA.nbytes)


# --- layers as they were sent ---


@pytest.mark.parametrize("transport", [TransportChoice.BODY, TransportChoice.SHARED_MEMORY])
@pytest.mark.parametrize("has_target", [False, True])
def test_who_decodes_elsewhere_gets_layers_as_they_were_sent(
    server: RunningServer, transport: TransportChoice, has_target: bool
) -> None:
    with client_of(server) as client:
        target: Target | None = client.shared_memory_target(DATA.nbytes) if has_target else None
        request = FetchRequest(
            BUCKET,
            replace(ASKED, encodings=(ZSTD,)),
            target,
            transport,
            30.0,
            time.monotonic(),
            decodes=False,
        )
        out = np.empty((CHUNKS, SLICE_BYTES), np.uint8)
        decoder = SliceDecoder()
        with fetch(client._core, request) as delivery:
            directory = delivery.wait_directory()
            assert directory is not None
            for layer, wire in delivery:
                begin, end = directory.layer_offsets[layer : layer + 2]
                assert wire.shape == (end - begin,)
                if target is not None:
                    assert np.shares_memory(wire, target.array)
                directory.decode_layer(layer, wire, out, decoder)
                assert np.array_equal(out, DATA[:, layer])
            assert delivery.wait().shape == (directory.payload_bytes,)
        plain = replace(request, descriptor=ASKED)
        with fetch(client._core, plain) as delivery:
            assert delivery.wait_directory() is None
            assert np.array_equal(delivery.wait_layer(1), DATA[:, 1])
