"""What a client sends where slices are put encoded, against a scripted gateway."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace

from objectcache import Client, InvalidRequest, KvLayout
from objectcache.kv_bucket import KvBucket
from objectcache_encodings import SliceDecoder
from objectcache_encodings.payload_directory import PayloadDirectory, directory_bytes
from objectcache_schemas.descriptor import DeliveryMode, Descriptor
from objectcache_schemas.limits import MIB, Limits
from objectcache_schemas.messages.frames import LENGTH
from tests.unit.client.client_fakes import FakeGateway, Peer, Received
from tests.unit.encodings.kv_numbers import kv_slices

LAYOUT = KvLayout(
    num_layers=4, chunk_tokens=16, per_layer_chunk_bytes=8192, dtype="bfloat16", fingerprint="put"
)
KEYS = ["a", "b", "c"]
SHAPE = (len(KEYS), LAYOUT.num_layers, LAYOUT.per_layer_chunk_bytes)
CHUNKS = kv_slices(SHAPE[0] * SHAPE[1], SHAPE[2]).reshape(SHAPE)
ZSTD = "planes-zstd"


class EncodedPuts:
    """Decodes what is put, as uint8[chunks, layers, slice_bytes]."""

    def __init__(self, *, knows_encoded: bool = True) -> None:
        self.knows_encoded = knows_encoded
        self.puts: list[Descriptor] = []
        self.stored: list[npt.NDArray[np.uint8]] = []
        self.body_bytes: list[int] = []
        self._lock = threading.Lock()
        self.gateway = FakeGateway(self.serve)

    def serve(self, request: Received, peer: Peer) -> None:
        (length,) = LENGTH.unpack_from(request.body)
        head = request.body[LENGTH.size : LENGTH.size + length]
        descriptor = Descriptor.from_bytes(head, Limits(), of_put=True)
        payload = request.body[LENGTH.size + length :]
        with self._lock:
            self.puts.append(descriptor)
            self.body_bytes.append(len(payload))
        if descriptor.encoded_bytes is not None and not self.knows_encoded:
            message = "descriptor: Object contains unknown field `encoded_bytes`"
            xml = f"<Error><Code>InvalidDescriptor</Code><Message>{message}</Message></Error>"
            peer.answer(400, body=xml.encode())
            return
        self.stored.append(decoded(descriptor, payload))
        peer.answer(body=msgspec.msgpack.encode({"v": 1, "stored": len(KEYS), "existing": 0}))


def decoded(descriptor: Descriptor, payload: bytes) -> npt.NDArray[np.uint8]:
    count, layers, slice_bytes = (
        len(descriptor.chunk_keys),
        descriptor.num_layers,
        descriptor.per_layer_chunk_bytes,
    )
    if descriptor.encoded_bytes is None:
        data = np.frombuffer(payload, np.uint8)
        if descriptor.delivery is DeliveryMode.CHUNKWISE:
            return data.reshape(count, layers, slice_bytes)
        return data.reshape(layers, count, slice_bytes).swapaxes(0, 1)
    assert len(payload) == descriptor.encoded_bytes
    directory = PayloadDirectory.from_bytes(
        payload[: directory_bytes(1, layers)],
        chunk_count=count,
        layer_count=layers,
        slice_bytes=slice_bytes,
    )
    out = np.empty((layers, count, slice_bytes), np.uint8)
    for layer in range(layers):
        begin, end = directory.layer_offsets[layer : layer + 2]
        directory.decode_layer(layer, memoryview(payload)[begin:end], out[layer], SliceDecoder())
    return out.swapaxes(0, 1)


@pytest.fixture
def server() -> Iterator[EncodedPuts]:
    puts = EncodedPuts()
    with puts.gateway:
        yield puts


def bucket_of(client: Client, layout: KvLayout) -> KvBucket:
    return KvBucket(client._core, "kv", layout)  # pyright: ignore[reportPrivateUsage]


def put_as(bucket: KvBucket, way: str, chunks: npt.NDArray[np.uint8], **options: Any) -> None:
    if way == "list":
        bucket.put(KEYS, [chunk.tobytes() for chunk in chunks], **options)
    elif way == "whole":
        bucket.put(KEYS, chunks, **options)
    else:
        with bucket.put_layers(KEYS, **options) as put:
            for layer in range(LAYOUT.num_layers):
                put.write_layer(chunks[:, layer])


@pytest.mark.parametrize("way", ["list", "whole", "layers"])
def test_slices_are_sent_as_frames_and_decode_to_what_was_put(
    server: EncodedPuts, way: str
) -> None:
    with server.gateway.client(transport="body", put_encoding=ZSTD) as client:
        put_as(bucket_of(client, LAYOUT), way, CHUNKS)
        put_as(bucket_of(client, LAYOUT), way, CHUNKS, encoding="")
    assert [one.encoded_bytes is None for one in server.puts] == [False, True]
    assert all(np.array_equal(one, CHUNKS) for one in server.stored)
    encoded, plain = server.body_bytes
    assert plain == CHUNKS.nbytes
    assert encoded < plain / 1.35


@pytest.mark.parametrize("way", ["list", "layers"])
def test_a_server_from_before_it_is_sent_plain_chunks_and_that_is_remembered(way: str) -> None:
    server = EncodedPuts(knows_encoded=False)
    with server.gateway, server.gateway.client(transport="body", put_encoding=ZSTD) as client:
        for _ in range(2):
            put_as(bucket_of(client, LAYOUT), way, CHUNKS)
    assert [one.encoded_bytes is None for one in server.puts] == [False, True, True]
    assert all(np.array_equal(one, CHUNKS) for one in server.stored)


@pytest.mark.parametrize("way", ["list", "layers"])
@pytest.mark.parametrize("content", ["random", "zeros"])
def test_what_shrinks_not_at_all_or_beyond_belief_is_sent_plain(
    server: EncodedPuts, way: str, content: str
) -> None:
    chunks = np.zeros(SHAPE, np.uint8)
    if content == "random":
        chunks = np.random.default_rng(1).integers(0, 256, SHAPE, np.uint8)
    layout = replace(LAYOUT, dtype="uint8" if content == "zeros" else "bfloat16")
    with server.gateway.client(transport="body", put_encoding=ZSTD) as client:
        put_as(bucket_of(client, layout), way, chunks)
    assert [one.encoded_bytes for one in server.puts] == [None]
    assert np.array_equal(server.stored[0], chunks)


def test_slices_over_a_mebibyte_are_sent_plain(server: EncodedPuts) -> None:
    layout = replace(LAYOUT, num_layers=1, per_layer_chunk_bytes=2 * MIB)
    chunks = kv_slices(len(KEYS), 2 * MIB).reshape(len(KEYS), 1, -1)
    with server.gateway.client(transport="body", put_encoding=ZSTD) as client:
        bucket_of(client, layout).put(KEYS, chunks)
    assert [one.encoded_bytes for one in server.puts] == [None]


def test_an_encoding_that_there_is_none_of_is_told_by_its_name(server: EncodedPuts) -> None:
    with pytest.raises(InvalidRequest, match="put_encoding must be auto, planes-zstd"):
        Client("http://localhost:1", access_key="a", secret_key="b", put_encoding="gzip")
    with server.gateway.client() as client, pytest.raises(InvalidRequest, match="encoding must"):
        bucket_of(client, LAYOUT).put(KEYS, CHUNKS, encoding="zstd")
