"""Tokens of S3 over RDMA: what is one, what is none, and that nothing shows what it opens."""

from __future__ import annotations

import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from objectcache_gateway.request.rdma_token import RdmaTransport, parse_rdma_token
from objectcache_schemas.errors import InvalidRequest
from tests.cuobject_client import cuobject_token, hipobject_token

GID = bytes(10) + b"\xff\xff\x0a\x00\x00\x07"
GOOD = "0102030405060708:01020304:0a0b0c0d:0102:010203:1:0102030405060708090a0b0c0d0e0f10"

addresses = st.integers(0, (1 << 64) - (1 << 32))
sizes = st.integers(1, (1 << 32) - 1)
keys = st.integers(0, (1 << 32) - 1)
numbers = st.integers(1, (1 << 24) - 1)
gids = st.binary(min_size=16, max_size=16).filter(any)


def refusal(text: str) -> str:
    with pytest.raises(InvalidRequest) as caught:
        parse_rdma_token(text)
    assert caught.value.code == "InvalidRDMAToken"
    assert len(text) < 8 or text not in caught.value.message
    return caught.value.message


@given(addresses, sizes, keys, st.integers(0, 65535), numbers, gids)
def test_a_cuobject_token_says_what_its_client_wrote(
    address: int, size_bytes: int, key: int, lid: int, target: int, gid: bytes
) -> None:
    text = cuobject_token(address, size_bytes, key=key, lid=lid, target=target, gid=gid)
    assert len(text) == 81
    token = parse_rdma_token(text)
    assert token.transport is RdmaTransport.DYNAMICALLY_CONNECTED
    assert (token.address, token.size_bytes, token.key) == (address, size_bytes, key)
    assert (token.lid, token.queue_pair, token.gid) == (lid, target, gid)


@given(st.sampled_from(RdmaTransport), addresses, st.integers(1, 1 << 31), numbers, gids)
def test_a_hipobject_token_says_what_its_client_wrote(
    transport: RdmaTransport, address: int, size_bytes: int, queue_pair: int, gid: bytes
) -> None:
    text = hipobject_token(transport.value, address, size_bytes, queue_pair=queue_pair, gid=gid)
    assert len(text) == 88
    token = parse_rdma_token(text.upper())
    assert token.transport is transport
    assert (token.address, token.size_bytes, token.queue_pair) == (address, size_bytes, queue_pair)


@given(st.text(max_size=200))
@example("")
@example(":" * 6)
@example(GOOD.replace(":", " "))
@example(GOOD[:-1] + "٣")  # a digit, but not a hexadecimal one
@example("0x" + GOOD[2:])
@example(GOOD + "\n")
@example(GOOD + "," + GOOD)  # the header was sent twice
@example(GOOD + ":0000000000000001")
@example(GOOD.upper())
@example("00" * 44)
def test_what_is_no_token_is_refused_without_a_word_of_it(text: str) -> None:
    refusal(text)


@given(st.integers(0, 80), st.sampled_from("0123456789abcdef:ghG -"))
def test_a_token_of_which_one_character_changed_is_another_or_none(
    position: int, character: str
) -> None:
    changed = GOOD[:position] + character + GOOD[position + 1 :]
    try:
        token = parse_rdma_token(changed)
    except InvalidRequest:
        refusal(changed)
    else:
        assert (token == parse_rdma_token(GOOD)) == (changed == GOOD)


@pytest.mark.parametrize(
    ("token", "why"),
    [
        (cuobject_token(4096, 0), "no byte"),
        (cuobject_token((1 << 64) - 10, 11), "past the address space"),
        (cuobject_token(4096, 10, target=0), "no queue pair"),
        (cuobject_token(4096, 10, gid=None, lid=0), "neither a LID nor a GID"),
        (cuobject_token(4096, 10, gid=bytes(16), lid=0), "neither a LID nor a GID"),
        (cuobject_token(4096, 10).replace(":1:", ":2:"), "descriptor"),
        (cuobject_token(4096, 10) + ":0000000000001000:0000000000000000", "name no memory"),
        (hipobject_token(2, 4096, 10), "neither 0 nor 1"),
        (hipobject_token(1, 4096, 0), "no byte"),
        ("a" * 116, "115 characters"),
    ],
)
def test_a_token_that_names_no_memory_is_refused(token: str, why: str) -> None:
    assert why in refusal(token)


def test_a_token_may_name_all_that_its_fields_hold() -> None:
    largest = parse_rdma_token(cuobject_token((1 << 64) - 0xFFFFFFFF, 0xFFFFFFFF))
    assert largest.size_bytes == 0xFFFFFFFF
    assert parse_rdma_token(cuobject_token(0, 1, gid=None, lid=7)).gid is None
    appended = cuobject_token(4096, 10) + ":0000000000001000:000000000000000a"
    assert parse_rdma_token(appended) == parse_rdma_token(cuobject_token(4096, 10))


def test_a_tokens_repr_opens_nothing() -> None:
    token = parse_rdma_token(cuobject_token(0x7F00AABBCCDD, 4096, key=0x1234ABCD, gid=GID))
    assert repr(token) == (
        "RdmaToken(transport=<RdmaTransport.DYNAMICALLY_CONNECTED: 0>, size_bytes=4096)"
    )


def test_a_hipobject_token_lies_as_in_its_clients_memory() -> None:
    packed = struct.pack("<BI16sIQQBH", 1, 17, GID, 0xABCD, 1 << 40, 1 << 33, 1, 0)
    token = parse_rdma_token(packed.hex())
    assert (token.transport, token.queue_pair) == (RdmaTransport.RELIABLE_CONNECTION, 17)
    assert (token.key, token.address, token.size_bytes) == (0xABCD, 1 << 40, 1 << 33)
