"""The start of a kv-put's body, however it is cut into pieces."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache_gateway.handlers.kv.prefixes import PutHead
from objectcache_schemas.descriptor import DeliveryMode, Descriptor, MemoryTarget
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import Limits

DESCRIPTOR = Descriptor(("a", "b"), 3, 16, 5, DeliveryMode.LAYERWISE)
WIRE = DESCRIPTOR.to_bytes()
PAYLOAD = bytes(range(30))
BODY = len(WIRE).to_bytes(4, "big") + WIRE + PAYLOAD


def cut(body: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(places), len(body)]
    return [body[start:end] for start, end in itertools.pairwise(edges)]


@given(st.lists(st.integers(0, len(BODY)), max_size=8), st.booleans())
def test_any_pieces_give_the_descriptor_and_the_payload(places: list[int], known: bool) -> None:
    head = PutHead(Limits(), len(BODY) if known else None)
    payload = b"".join(bytes(head.take(piece)) for piece in cut(BODY, places))
    head.finish()
    assert payload == PAYLOAD
    assert head.descriptor == DESCRIPTOR
    assert head.descriptor_bytes == WIRE


def test_with_a_target_the_body_ends_behind_the_descriptor() -> None:
    target = MemoryTarget(
        transport="shared_memory", target_id=bytes(16), offset_bytes=0, length_bytes=30, tag=0
    )
    wire = replace(DESCRIPTOR, rdma_target=target, parent_key="p").to_bytes()
    body = len(wire).to_bytes(4, "big") + wire
    head = PutHead(Limits(), len(body))
    assert not head.has_payload
    assert not head.take(body)
    head.finish()
    assert not head.has_payload
    assert head.descriptor is not None
    assert head.descriptor.parent_key == "p"
    assert refusal(body + PAYLOAD) == "IncompleteBody"
    assert refusal(body, len(body) + len(PAYLOAD)) == "IncompleteBody"


def take_whole(body: bytes, announced_bytes: int | None) -> None:
    head = PutHead(Limits(), announced_bytes)
    head.take(body)
    head.finish()


def refusal(body: bytes, announced_bytes: int | None = None) -> str:
    with pytest.raises(InvalidRequest) as caught:
        take_whole(body, announced_bytes)
    return caught.value.code


@pytest.mark.parametrize("length_bytes", [len(BODY) - 1, len(BODY) + 1])
def test_a_length_that_does_not_add_up_is_refused_at_the_descriptor(length_bytes: int) -> None:
    assert refusal(BODY[: 4 + len(WIRE)], length_bytes) == "IncompleteBody"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "IncompleteBody"),
        (BODY[:3], "IncompleteBody"),
        (BODY[:20], "IncompleteBody"),
        (BODY[:-1], "IncompleteBody"),
        (BODY + b"x", "IncompleteBody"),
        (bytes(4), "InvalidDescriptor"),
        ((1 << 31).to_bytes(4, "big"), "DescriptorTooLarge"),
        (b"\0\0\0\x01\xc1", "InvalidDescriptor"),
    ],
)
def test_a_body_that_is_not_whole_or_not_one_is_refused(body: bytes, code: str) -> None:
    assert refusal(body) == code
