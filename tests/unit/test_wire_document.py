"""The worked examples of docs/wire.md are what the code produces."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import msgspec
import pytest

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
    LayersConsumed,
    LayersReady,
    NixlNames,
    OpenFabric,
    PassGiven,
    RegisterRemoteTarget,
    RegisterTarget,
    ReturnCredits,
)

DOCS = Path(__file__).parents[2] / "docs"
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
        msgspec.msgpack.encode(DeliveryOutcome(v=1, chunk_count=2, payload_bytes=32)),
        msgspec.msgpack.encode(MatchRequest(v=1, chunk_keys=("a", "b"))),
        msgspec.msgpack.encode(MatchReply(v=1, matched=1)),
        encode_frame(RegisterTarget(length_bytes=4096)),
        encode_frame(LayersReady(tag=7, end_layer=1)),
        encode_frame(LayersConsumed(tag=7, end_layer=1, compute_s=0.0088)),
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
        "outcome",
        "match",
        "matched",
        "register",
        "ready",
        "consumed",
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
