"""What the ends of a verbs connection tell each other, and what is believed of it."""

from __future__ import annotations

import sys

import msgspec
import pytest

from objectcache_fabrics.verbs.address import (
    END_LAYER_MAX,
    RECEIVES_MAX,
    Announcement,
    VerbsAddress,
)
from objectcache_fabrics.verbs.pyverbs_binding import load_pyverbs
from objectcache_schemas.errors import InvalidRequest, Unavailable
from objectcache_schemas.layout import NUM_LAYERS_MAX

IPV4 = bytes(10) + b"\xff\xff" + bytes([10, 77, 0, 1])
IPV6 = bytes([0x20, 1, 0xD, 0xB8]) + bytes(11) + b"\x09"
ADDRESS = VerbsAddress(
    qp_num=70_000, psn=(1 << 24) - 1, gid=IPV4, lid=3, mtu_bytes=4096, receives=128, reads=16
)


def changed(**fields: object) -> bytes:
    return msgspec.msgpack.encode({**msgspec.structs.asdict(ADDRESS), **fields})


def test_an_address_comes_back_from_its_bytes() -> None:
    assert VerbsAddress.from_bytes(ADDRESS.to_bytes()) == ADDRESS


def test_a_gid_is_written_as_eight_groups() -> None:
    assert ADDRESS.gid_text == "0000:0000:0000:0000:0000:ffff:0a4d:0001"
    over_ipv6 = VerbsAddress.from_bytes(changed(gid=IPV6))
    assert over_ipv6.gid_text == "2001:0db8:0000:0000:0000:0000:0000:0009"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("qp_num", 0),
        ("qp_num", 1 << 24),
        ("qp_num", "1"),
        ("psn", -1),
        ("psn", 1 << 24),
        ("gid", IPV4[:-1]),
        ("gid", IPV4 + b"\0"),
        ("gid", bytes(16)),
        ("gid", b"\xff\x02" + bytes(14)),
        ("gid", IPV4[:12] + bytes([224, 0, 0, 1])),
        ("gid", IPV4[:12] + bytes(4)),
        ("gid", IPV4[:12] + b"\xff" * 4),
        ("lid", 1 << 16),
        ("mtu_bytes", 1500),
        ("mtu_bytes", 8192),
        ("receives", RECEIVES_MAX + 1),
        ("receives", -1),
        ("reads", 256),
    ],
)
def test_a_peer_that_tells_nonsense_is_refused_by_the_fields_name(
    field: str, value: object
) -> None:
    with pytest.raises(InvalidRequest, match=f"endpoint.*{field}"):
        VerbsAddress.from_bytes(changed(**{field: value}))


def test_what_is_no_address_is_refused() -> None:
    for endpoint in (b"", b"\xc1", b"\x80", changed(more=1), bytes(300)):
        with pytest.raises(InvalidRequest, match="endpoint"):
            VerbsAddress.from_bytes(endpoint)


def test_an_address_is_not_shown() -> None:
    assert repr(ADDRESS) == "<VerbsAddress mtu 4096, 128 receives>"


@pytest.mark.parametrize(("tag", "end_layer"), [(0, 0), (1, 8191), ((1 << 19) - 1, 1), (77, 32)])
def test_an_announcement_comes_back_from_its_32_bits(tag: int, end_layer: int) -> None:
    immediate = Announcement(tag, end_layer).to_immediate()
    assert 0 <= immediate < 1 << 32
    assert Announcement.from_immediate(immediate) == (tag, end_layer)


def test_tag_and_end_layer_do_not_run_into_each_other() -> None:
    assert Announcement(1, 0).to_immediate() == 1 << 13
    assert Announcement(0, 1).to_immediate() == 1


def test_tags_are_told_apart_by_their_lowest_19_bits() -> None:
    immediate = Announcement((1 << 19) + 5, 9).to_immediate()
    assert Announcement.from_immediate(immediate) == (5, 9)


def test_every_layer_of_every_model_can_be_announced() -> None:
    assert NUM_LAYERS_MAX <= END_LAYER_MAX


def test_without_the_library_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load_pyverbs.cache_clear()
    monkeypatch.setitem(sys.modules, "pyverbs", None)
    with pytest.raises(Unavailable, match="python3-pyverbs"):
        load_pyverbs()
