"""The worked examples of docs/wire.md are what the code produces."""

from __future__ import annotations

import base64
import re
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from objectcache.core import TransportChoice
from objectcache.puts.encode_layers import EncodedLayers
from objectcache.puts.put_request import PutRequest
from objectcache_encodings import SliceDecoder, SliceEncoder
from objectcache_encodings.lossy import LOSSY_DTYPES, KvShape
from objectcache_fabrics.verbs.address import Announcement, VerbsAddress
from objectcache_schemas.descriptor import (
    DeliveryMode,
    DeliveryOutcome,
    Descriptor,
    MatchReply,
    MatchRequest,
)
from objectcache_schemas.errors import ERRORS
from objectcache_schemas.layout import KvLayout
from objectcache_schemas.limits import Limits
from objectcache_schemas.messages.frames import LENGTH, encode_frame
from objectcache_schemas.messages.sessions import (
    CancelGet,
    FabricOpened,
    GetBegun,
    GetEnded,
    GetPrefix,
    LayersAwaited,
    LayersConsumed,
    LayersFreed,
    LayersReady,
    NixlNames,
    OpenFabric,
    PassGiven,
    RegisterRemoteTarget,
    RegisterTarget,
    ReturnCredits,
    TargetRegistered,
)
from objectcache_schemas.records import Condition
from objectcache_storage_server.engines.base import PrefixShape, StagedPut
from objectcache_storage_server.engines.memory.engine import MemoryEngine
from objectcache_storage_server.puts.encoded_payload import EncodedPayload
from tests.contract.engine_suite import BUCKET, read

DOCS = Path(__file__).parents[3] / "docs"
WIRE = (DOCS / "wire.md").read_text("utf-8")
HEX_RUNS = [
    bytes.fromhex("".join(run))
    for run in (
        re.findall(r"\b[0-9a-f]{2}(?= |$)", " ".join(block.splitlines()))
        for block in re.findall(r"(?:^ {4,}(?:\w+ +)?(?:[0-9a-f]{2} ){3,}.*\n)+", WIRE, re.M)
    )
]
LAYOUT = KvLayout(
    num_layers=2, chunk_tokens=4, per_layer_chunk_bytes=8, dtype="uint8", fingerprint="toy"
)
DESCRIPTOR = msgspec.msgpack.encode(
    {
        "v": 1,
        "chunk_keys": ["a", "b"],
        "num_layers": 2,
        "chunk_tokens": 4,
        "per_layer_chunk_bytes": 8,
        "delivery": "layerwise",
    }
)

WHO_ASKS = msgspec.msgpack.encode(
    msgspec.msgpack.decode(DESCRIPTOR)
    | {"context_tokens": 12, "fingerprint": "llama-tp2", "computed_tokens": 4}
)
WHO_DECODES = msgspec.msgpack.encode(
    msgspec.msgpack.decode(DESCRIPTOR) | {"encodings": ["planes-zstd"]}
)
TAIL_PUT = msgspec.msgpack.encode(
    {
        "v": 1,
        "chunk_keys": ["c"],
        "num_layers": 2,
        "chunk_tokens": 4,
        "per_layer_chunk_bytes": 8,
        "delivery": "chunkwise",
        "parent_key": "b",
    }
)
ENCODED_PUT = msgspec.msgpack.encode(
    msgspec.msgpack.decode(DESCRIPTOR) | {"per_layer_chunk_bytes": 128, "encoded_bytes": 320}
)
NAMES = msgspec.msgpack.encode(NixlNames(client="client-1", server="server-1"))
VERBS_ADDRESS = VerbsAddress(
    qp_num=17, psn=5, gid=bytes.fromhex("ffff0a000001").rjust(16, b"\0"), receives=128, reads=16
)


@pytest.mark.parametrize(
    "example",
    [
        LAYOUT.to_bytes(),
        DESCRIPTOR,
        WHO_ASKS,
        WHO_DECODES,
        msgspec.msgpack.encode(DeliveryOutcome(v=1, chunk_count=2, payload_bytes=32)),
        msgspec.msgpack.encode(MatchRequest(v=1, chunk_keys=("a", "b"))),
        msgspec.msgpack.encode(MatchReply(v=1, matched=1)),
        encode_frame(RegisterTarget(length_bytes=4096)),
        encode_frame(LayersReady(tag=7, end_layer=1)),
        encode_frame(LayersConsumed(tag=7, end_layer=1, compute_s=0.0088)),
        encode_frame(TargetRegistered(target_id=bytes(16), hears_awaited=True)),
        encode_frame(LayersAwaited(tag=7, end_layer=6, interval_s=0.25)),
        encode_frame(LayersFreed(tag=7, end_layer=1)),
        encode_frame(PassGiven(bucket="kv", lives_s=60.0)),
        encode_frame(GetPrefix(tag=7, bucket="kv", descriptor=b"\x86", request_id="A1")),
        encode_frame(GetBegun(tag=7, delivery="layerwise", chunk_count=2, path="agg")),
        encode_frame(GetEnded(tag=7, payload_bytes=32)),
        encode_frame(CancelGet(tag=7)),
        LENGTH.pack(len(TAIL_PUT)) + TAIL_PUT,
        msgspec.msgpack.encode(OpenFabric(transport="nixl")),
        msgspec.msgpack.encode(FabricOpened(endpoint=NAMES)),
        msgspec.msgpack.encode(
            RegisterRemoteTarget(length_bytes=4096, address=0x7F0000001000, metadata=b"nixl")
        ),
        VERBS_ADDRESS.to_bytes(),
        msgspec.msgpack.encode(ReturnCredits(count=64)),
    ],
    ids=[
        "layout",
        "descriptor",
        "who asks",
        "who decodes",
        "outcome",
        "match",
        "matched",
        "register",
        "ready",
        "consumed",
        "registered",
        "awaited",
        "freed",
        "pass",
        "get",
        "begun",
        "ended",
        "cancel",
        "put",
        "open",
        "opened",
        "remote",
        "verbs",
        "credits",
    ],
)
def test_the_hex_of_an_example_is_what_the_code_sends(example: bytes) -> None:
    assert any(example in run for run in HEX_RUNS)


RISING = b"".join(bytes((low, 0x3F)) for low in range(0, 256, 8))


@pytest.mark.parametrize(
    ("slice_", "encoding"),
    [
        (bytes.fromhex("8d3f20bf03be7c40"), "planes-zstd"),
        (RISING, "planes-zstd"),
        (RISING, "planes-deflate"),
    ],
    ids=["plain", "zstd", "deflate"],
)
def test_the_frame_of_an_encoded_slice_is_what_the_code_writes_and_reads(
    slice_: bytes, encoding: str
) -> None:
    frame = SliceEncoder(encoding).encode_slice(slice_)
    assert frame in HEX_RUNS
    out = np.zeros(len(slice_), np.uint8)
    SliceDecoder().decode_into(frame, out)
    assert out.tobytes() == slice_


@pytest.mark.parametrize("name", LOSSY_DTYPES)
def test_a_quantised_slice_is_what_the_code_writes(name: str) -> None:
    shape = KvShape(tokens=2, heads=1, width=2)
    numbers = np.array([1, -0.5, 0.25, 2, -3, 1.5, 0, 0.75], np.float32)
    slices = np.zeros((1, shape.slice_bytes), np.uint8)
    shape.from_floats(numbers.reshape(shape.axes), slices[0])
    assert slices.tobytes() in HEX_RUNS
    assert LOSSY_DTYPES[name](shape).quantise(slices, 0).tobytes() in HEX_RUNS


def test_the_notification_and_the_immediate_data_are_what_the_code_sends() -> None:
    ready = msgspec.msgpack.encode(LayersReady(tag=7, end_layer=1))
    assert ready in HEX_RUNS  # alone: a notification has no length before it
    immediate = Announcement(7, 1).to_immediate().to_bytes(4, "big")
    assert f"Tag 7 and end layer 1 are `{immediate.hex(' ')}`" in WIRE


def test_the_key_example_is_what_the_code_computes() -> None:
    assert LAYOUT.key_seed().hex() in WIRE
    keys = LAYOUT.chunk_keys([1, 2, 3, 4, 5, 6, 7, 8])
    assert len(keys) == 2
    assert all(key in WIRE for key in keys)


def test_the_header_example_is_the_descriptor_example() -> None:
    (header,) = re.findall(r"x-objectcache-descriptor: (\S+)", WIRE)
    assert header == base64.urlsafe_b64encode(DESCRIPTOR).rstrip(b"=").decode()
    expected = Descriptor(("a", "b"), 2, 4, 8, DeliveryMode.LAYERWISE)
    assert Descriptor.from_header(header, Limits()) == expected


def test_the_put_example_is_a_descriptor_of_a_put() -> None:
    expected = Descriptor(("c",), 2, 4, 8, DeliveryMode.CHUNKWISE, parent_key="b")
    assert Descriptor.from_bytes(TAIL_PUT, Limits(), of_put=True) == expected


def _encoded_put_example() -> tuple[Descriptor, bytes]:
    """The descriptor of the document's encoded put, and the payload behind it."""
    begin = LENGTH.pack(len(ENCODED_PUT)) + ENCODED_PUT
    (body,) = (run for run in HEX_RUNS if run.startswith(begin))
    descriptor = Descriptor.from_bytes(ENCODED_PUT, Limits(), of_put=True)
    return descriptor, body[len(begin) :]


def _encoded_put_slices() -> npt.NDArray[np.uint8]:
    """uint8[layers, chunks, slice_bytes] of it."""
    fills = np.array([[0x0A, 0x0B], [0x1A, 0x1B]], np.uint8)
    return np.repeat(fills[:, :, np.newaxis], 128, axis=2)


def test_the_encoded_put_example_is_what_a_client_sends() -> None:
    descriptor, payload = _encoded_put_example()
    assert descriptor.put_bytes == len(payload)
    plain = replace(descriptor, delivery=DeliveryMode.CHUNKWISE, encoded_bytes=None)
    put = PutRequest("kv", plain, TransportChoice.BODY, 1.0, "planes-zstd", element_bytes=1)
    layers = EncodedLayers(put, "planes-zstd")
    for slices in _encoded_put_slices():
        layers.add(list(slices))
    encoded = layers.payload()
    assert encoded is not None
    sent, parts = encoded
    assert sent.descriptor == descriptor
    assert b"".join(parts) == payload


def test_the_encoded_put_example_is_stored_as_the_slices_that_it_names() -> None:
    descriptor, payload = _encoded_put_example()
    engine = MemoryEngine()
    engine.create_bucket(BUCKET)
    shape = PrefixShape(
        descriptor.chunk_keys,
        descriptor.num_layers,
        descriptor.per_layer_chunk_bytes,
        layerwise=True,
        encoded_bytes=descriptor.encoded_bytes,
    )
    prefix = engine.stage_prefix(BUCKET.name, shape)
    EncodedPayload(prefix, shape, copies=False).write(0, memoryview(payload))
    engine.commit([StagedPut(one, "") for one in prefix.staged], Condition(immutable=True))
    slices = _encoded_put_slices()
    for chunk, key in enumerate(descriptor.chunk_keys):
        assert read(engine, key) == slices[:, chunk].tobytes()
    engine.close()


def test_the_error_document_is_the_table() -> None:
    text = (DOCS / "errors.md").read_text("utf-8")
    documented = re.findall(
        r"^\| `(\w+)` \| `(\w+)` \| (\d+) \| (\w+) \| (\w+) \| (.*) \|$", text, re.M
    )
    assert documented == [
        (
            row.code,
            row.error_class.__name__,
            str(row.http_status),
            row.fault.value,
            row.retry.value,
            row.meaning,
        )
        for row in ERRORS.values()
    ]
