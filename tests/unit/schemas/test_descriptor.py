"""Descriptors and layouts: what is accepted comes back the same; everything else is refused."""

from __future__ import annotations

import base64
import tracemalloc
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache_schemas.descriptor import (
    DeliveryMode,
    Descriptor,
    MatchRequest,
    MemoryTarget,
    OnMissing,
)
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.layout import KvLayout
from objectcache_schemas.limits import Limits

LIMITS = Limits()
KEYS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)


def fields(**changes: Any) -> dict[str, Any]:
    """A valid descriptor map, changed; a value of `...` removes the field."""
    base = {
        "v": 1,
        "chunk_keys": ["a", b"\x01\xff"],
        "num_layers": 2,
        "chunk_tokens": 16,
        "per_layer_chunk_bytes": 64,
    } | changes
    return {name: value for name, value in base.items() if value is not ...}


@st.composite
def descriptors(draw: st.DrawFn) -> Descriptor:
    num_layers = draw(st.integers(1, 100))
    first = draw(st.integers(0, num_layers - 1))
    layers = draw(st.none() | st.tuples(st.just(first), st.integers(first + 1, num_layers)))
    target = MemoryTarget(
        transport="shared_memory",
        target_id=draw(st.binary(min_size=16, max_size=16)),
        offset_bytes=draw(st.integers(0, 1 << 40)),
        length_bytes=draw(st.integers(0, 1 << 40)),
        tag=draw(st.integers(0, (1 << 63) - 1)),
    )
    return Descriptor(
        tuple(draw(st.lists(KEYS.filter(lambda key: len(key.encode()) <= 1024), min_size=1))),
        num_layers,
        draw(st.integers(1, 65_536)),
        draw(st.integers(1, 1 << 20)),
        draw(st.sampled_from(DeliveryMode)),
        layers,
        draw(st.sampled_from(OnMissing)),
        draw(st.none() | st.floats(0, 3600)),
        draw(st.none() | st.just(target)),
    )


@given(descriptors(), st.none() | KEYS.filter(lambda key: len(key.encode()) <= 1024))
def test_a_puts_descriptor_survives_with_its_parent(
    descriptor: Descriptor, parent_key: str | None
) -> None:
    put = replace(descriptor, parent_key=parent_key)
    assert Descriptor.from_bytes(put.to_bytes(), LIMITS, of_put=True) == put
    if parent_key is None:
        assert put.to_bytes() == descriptor.to_bytes()
        assert b"parent_key" not in put.to_bytes()


def put_of(parent_key: Any) -> Descriptor:
    wire = msgspec.msgpack.encode(fields(parent_key=parent_key))
    return Descriptor.from_bytes(wire, LIMITS, of_put=True)


def test_a_binary_parent_becomes_hex_and_nil_is_none() -> None:
    assert put_of(b"\x01\xff").parent_key == "01ff"
    assert put_of("p").parent_key == "p"
    assert put_of(None).parent_key is None


@pytest.mark.parametrize("parent_key", ["", "a\0b", b"", 1, ["a"], "\u00e9" * 513])
def test_a_parent_is_checked_as_a_chunk_key_is(parent_key: Any) -> None:
    with pytest.raises(InvalidRequest, match="parent_key") as caught:
        put_of(parent_key)
    assert caught.value.row.http_status == 400


def test_a_parent_is_refused_in_a_get_and_nil_is_not() -> None:
    for parent_key in ("p", b"p", 1):
        with pytest.raises(InvalidRequest, match="parent_key"):
            Descriptor.from_bytes(msgspec.msgpack.encode(fields(parent_key=parent_key)), LIMITS)
    wire = msgspec.msgpack.encode(fields(parent_key=None))
    assert Descriptor.from_bytes(wire, LIMITS).parent_key is None


@given(descriptors())
def test_a_descriptor_survives_both_forms(descriptor: Descriptor) -> None:
    assert Descriptor.from_bytes(descriptor.to_bytes(), LIMITS) == descriptor
    header = descriptor.to_header()
    assert "=" not in header
    if len(header) <= LIMITS.descriptor_header_bytes_max:
        assert Descriptor.from_header(header, LIMITS) == descriptor


def test_optional_fields_have_the_documented_defaults_and_binary_keys_become_hex() -> None:
    descriptor = Descriptor.from_bytes(msgspec.msgpack.encode(fields()), LIMITS)
    assert descriptor == Descriptor(("a", "01ff"), 2, 16, 64)
    assert (descriptor.first_layer, descriptor.end_layer) == (0, 2)
    assert descriptor.payload_bytes(2) == 2 * 2 * 64
    assert descriptor.delivery is DeliveryMode.AUTO
    assert descriptor.on_missing is OnMissing.FAIL


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"v": 2}, "v must be 1"),
        ({"v": ...}, "`v`"),
        ({"chunk_keys": []}, "chunk_keys"),
        ({"chunk_keys": "abc"}, "chunk_keys"),
        ({"chunk_keys": [1]}, r"chunk_keys\[0\]"),
        ({"chunk_keys": ["a", ""]}, r"chunk_keys\[1\]"),
        ({"chunk_keys": ["a\0b"]}, r"chunk_keys\[0\]"),
        ({"chunk_keys": [b""]}, r"chunk_keys\[0\]"),
        ({"chunk_keys": [None]}, r"chunk_keys\[0\]"),
        ({"num_layers": 0}, "num_layers"),
        ({"num_layers": -1}, "num_layers"),
        ({"num_layers": 1 << 63}, "num_layers"),
        ({"num_layers": 1.5}, "num_layers"),
        ({"num_layers": True}, "num_layers"),
        ({"num_layers": "2"}, "num_layers"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"per_layer_chunk_bytes": 0}, "per_layer_chunk_bytes"),
        ({"per_layer_chunk_bytes": -64}, "per_layer_chunk_bytes"),
        ({"per_layer_chunk_bytes": 1 << 40}, "per_layer_chunk_bytes"),
        ({"delivery": "sideways"}, "delivery"),
        ({"delivery": 1}, "delivery"),
        ({"layers": [0]}, "layers"),
        ({"layers": [1, 1]}, "layers"),
        ({"layers": [0, 3]}, "layers"),
        ({"layers": [-1, 1]}, "layers"),
        ({"on_missing": "ignore"}, "on_missing"),
        ({"compute_window_s": float("nan")}, "compute_window_s"),
        ({"compute_window_s": -1.0}, "compute_window_s"),
        ({"compute_window_s": float("inf")}, "compute_window_s"),
        ({"compute_window_s": 1e12}, "compute_window_s must be a number of seconds from 0 to 3600"),
        ({"context_tokens": 0}, "context_tokens"),
        ({"context_tokens": 1}, "context_tokens is 1, but chunk_keys alone hold"),
        ({"context_tokens": 1 << 41}, "context_tokens"),
        ({"model": "../../etc/passwd"}, "model must be"),
        ({"model": ""}, "model must be"),
        ({"fingerprint": ""}, "fingerprint must be 1 to 256 bytes"),
        ({"fingerprint": "m" * 257}, "fingerprint must be"),
        ({"fingerprint": "two\nlines"}, "fingerprint must be"),
        ({"fingerprint": 7}, "fingerprint"),
        ({"computed_tokens": 0}, "computed_tokens"),
        ({"computed_tokens": 1 << 41}, "computed_tokens"),
        ({"rate_bytes_per_s": 65_535.0}, "rate_bytes_per_s must be .* 65536 or more"),
        ({"rate_bytes_per_s": float("nan")}, "rate_bytes_per_s"),
        ({"nic": ""}, "nic must be 1 to 128 letters"),
        ({"nic": "a/b"}, "nic must be 1 to 128 letters"),
        ({"nic": "n" * 129}, "nic must be 1 to 128 letters"),
        ({"nic": "node7\n"}, "nic must be 1 to 128 letters"),
        ({"nic_bytes_per_s": 1e9}, "nic_bytes_per_s is the rate of a NIC, which nic must name"),
        ({"nic": "n", "nic_bytes_per_s": 0.0}, "nic_bytes_per_s must be .* 65536"),
        ({"nic": "n", "nic_bytes_per_s": -1e9}, "nic_bytes_per_s must be .* 65536"),
        ({"nic": "n", "nic_bytes_per_s": float("inf")}, "nic_bytes_per_s must be"),
        ({"nic": "n", "nic_bytes_per_s": float("nan")}, "nic_bytes_per_s must be"),
        ({"rdma_target": {}}, "rdma_target"),
        ({"rdma_target": 5}, "rdma_target"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named) as caught:
        Descriptor.from_bytes(msgspec.msgpack.encode(fields(**changes)), LIMITS)
    assert caught.value.row.http_status == 400


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({"chunk_keys": ["k"] * 65_537}, "chunks_per_descriptor_max"),
        ({"num_layers": 4096, "per_layer_chunk_bytes": 1 << 30}, "payload_bytes_max"),
    ],
)
def test_a_huge_descriptor_names_the_limit(changes: dict[str, Any], limit: str) -> None:
    with pytest.raises(InvalidRequest, match=limit) as caught:
        Descriptor.from_bytes(msgspec.msgpack.encode(fields(**changes)), LIMITS)
    assert caught.value.code == "DescriptorTooLarge"


@pytest.mark.parametrize("count", [16, 65_537])
def test_too_many_chunks_are_refused_before_any_is_looked_at(count: int) -> None:
    limits = Limits(chunks_per_descriptor_max=min(count - 1, LIMITS.chunks_per_descriptor_max))
    invalid = [5, "", {}, []] * (count // 4) + [None] * (count % 4)
    match = msgspec.msgpack.encode({"v": 1, "chunk_keys": invalid})
    names = f"chunk_keys names {count} chunks, limits.chunks_per_descriptor_max"
    with pytest.raises(InvalidRequest, match=names):
        MatchRequest.keys_from_bytes(match, limits)
    with pytest.raises(InvalidRequest, match=names):
        Descriptor.from_bytes(msgspec.msgpack.encode(fields(chunk_keys=invalid)), limits)


def _peak_bytes(document: dict[str, Any]) -> int:
    """Memory that refusing a descriptor takes at most."""
    data = msgspec.msgpack.encode(document)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest):
            Descriptor.from_bytes(data, LIMITS, of_put=True)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "changes",
    [
        {"chunk_keys": [[]] * 1_000_000},
        {"chunk_keys": ["ab"] * 1_000_000},
        {"chunk_keys": [[[]] * 1_000_000]},
        {"chunk_keys": ["a", {number: [] for number in range(300_000)}]},
        {"parent_key": [[]] * 1_000_000},
    ],
)
def test_what_is_no_key_is_refused_without_being_made(changes: dict[str, Any]) -> None:
    assert _peak_bytes(fields(**changes)) < 1_000_000


def test_more_bytes_than_the_limit_are_refused_unread() -> None:
    with pytest.raises(InvalidRequest, match="descriptor_bytes_max"):
        Descriptor.from_bytes(b"\xc1" * 101, Limits(descriptor_bytes_max=100))


def test_a_key_over_1024_bytes_is_refused_by_bytes_not_characters() -> None:
    fits, over = "\u00e9" * 512, "\u00e9" * 513
    Descriptor.from_bytes(msgspec.msgpack.encode(fields(chunk_keys=[fits])), LIMITS)
    with pytest.raises(InvalidRequest, match=r"chunk_keys\[0\]") as caught:
        Descriptor.from_bytes(msgspec.msgpack.encode(fields(chunk_keys=[over])), LIMITS)
    assert caught.value.code == "KeyTooLongError"


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused_cleanly(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        Descriptor.from_bytes(data, LIMITS)


@given(st.data())
def test_a_truncated_or_damaged_descriptor_is_refused_or_still_legal(data: st.DataObject) -> None:
    raw = bytearray(Descriptor(("a", "b"), 2, 16, 64, layers=(0, 1)).to_bytes())
    cut = data.draw(st.integers(0, len(raw) - 1))
    with pytest.raises(InvalidRequest):
        Descriptor.from_bytes(bytes(raw[:cut]), LIMITS)
    raw[cut] ^= data.draw(st.integers(1, 255))
    try:
        descriptor = Descriptor.from_bytes(bytes(raw), LIMITS)
    except InvalidRequest:
        return
    assert descriptor.num_layers >= 1


@pytest.mark.parametrize(
    "raw",
    [
        b"\xdf\xff\xff\xff\xff",
        b"\x82\xa1v\x01\xaachunk_keys\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,
    ],
)
def test_announced_sizes_are_not_believed(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        Descriptor.from_bytes(raw, LIMITS)


@pytest.mark.parametrize("header", ["***", "a", "AA==", "\u00e9"])
def test_a_header_that_is_no_base64url_is_refused(header: str) -> None:
    with pytest.raises(InvalidRequest):
        Descriptor.from_header(header, LIMITS)


def test_a_long_header_names_the_post_form() -> None:
    raw = base64.urlsafe_b64encode(bytes(LIMITS.descriptor_header_bytes_max)).decode()
    with pytest.raises(InvalidRequest, match="POST"):
        Descriptor.from_header(raw, LIMITS)


def test_a_match_of_nothing_is_legal_and_a_wrong_one_is_not() -> None:
    assert (
        MatchRequest.keys_from_bytes(msgspec.msgpack.encode({"v": 1, "chunk_keys": []}), LIMITS)
        == ()
    )
    with pytest.raises(InvalidRequest, match="chunk_keys"):
        MatchRequest.keys_from_bytes(msgspec.msgpack.encode({"v": 1}), LIMITS)


def layout_of(**changes: Any) -> KvLayout:
    base = {"num_layers": 2, "chunk_tokens": 4, "per_layer_chunk_bytes": 64}
    return KvLayout(**(base | {"dtype": "bfloat16", "fingerprint": "model@1"} | changes))


def test_a_layout_survives_the_wire_and_refuses_what_is_out_of_bounds() -> None:
    assert KvLayout.from_bytes(layout_of().to_bytes()) == layout_of()
    for name in ("num_layers", "chunk_tokens", "per_layer_chunk_bytes"):
        with pytest.raises(InvalidRequest, match=name):
            layout_of(**{name: 0})
    with pytest.raises(InvalidRequest, match="dtype"):
        layout_of(dtype="")
    with pytest.raises(InvalidRequest, match="KV layout"):
        KvLayout.from_bytes(b"\x80")


@pytest.mark.parametrize("name", ["num_layers", "chunk_tokens", "per_layer_chunk_bytes", "v"])
@pytest.mark.parametrize("value", ["1", 1.0, None, True, np.int64(1)])
def test_a_layouts_number_of_another_type_is_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} must be an int, got {type(value).__name__}"):
        layout_of(**{name: value})


@pytest.mark.parametrize("name", ["dtype", "fingerprint"])
def test_a_layouts_text_of_another_type_is_named(name: str) -> None:
    for value in (None, 7, b"text"):
        kind = type(value).__name__
        with pytest.raises(InvalidRequest, match=f"{name} must be a string, got {kind}"):
            layout_of(**{name: value})
    with pytest.raises(InvalidRequest, match=f"{name} is no valid Unicode"):
        layout_of(**{name: "\ud800"})


def test_a_descriptor_that_differs_from_the_layout_names_the_field() -> None:
    descriptor = Descriptor(("a",), 2, 4, 65)
    with pytest.raises(InvalidRequest, match="per_layer_chunk_bytes is 65"):
        descriptor.check_layout(layout_of())


def test_chunk_keys_roll_over_whole_chunks_and_depend_on_everything_before() -> None:
    layout = layout_of()
    keys = layout.chunk_keys([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert len(keys) == 2
    assert layout.chunk_keys([1, 2, 3, 4]) == keys[:1]
    assert layout.chunk_keys([9, 2, 3, 4, 5, 6, 7, 8])[1] != keys[1]
    assert layout_of(fingerprint="model@2").chunk_keys([1, 2, 3, 4]) != keys[:1]
    assert layout.chunk_keys(bytes([1, 2, 3, 4])) == keys[:1]
    assert layout.chunk_keys([]) == []


@pytest.mark.parametrize("changes", [{"delivery": "x" * 900_000}, {"y" * 900_000: 1}])
def test_a_refusal_repeats_little_of_what_it_refuses(changes: dict[str, Any]) -> None:
    data = msgspec.msgpack.encode(fields(**changes))
    with pytest.raises(InvalidRequest) as caught:
        Descriptor.from_bytes(data, LIMITS)
    assert len(caught.value.message) < 400


def test_chunk_keys_are_the_documented_hash() -> None:
    import hashlib

    layout = layout_of()
    seed = hashlib.sha256(b"objectcache/chunk-key/v1\0" + layout.to_bytes()).digest()
    tokens = b"".join(token.to_bytes(4, "little") for token in (1, 70_000, 3, 4))
    expected = hashlib.sha256(seed + tokens).hexdigest()
    assert layout.chunk_keys([1, 70_000, 3, 4]) == [expected]


@pytest.mark.parametrize("tokens", [[-1, 0, 0, 0], [1 << 32, 0, 0, 0], [1.5, 0, 0, 0]])
def test_tokens_that_are_no_ids_are_refused(tokens: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="tokens"):
        layout_of().chunk_keys(tokens)
