"""A get is given what another one had landed only where it would have had the same bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from objectcache_relay.landing.claims import LandedKey, has_claimed, may_claim
from objectcache_relay.landing.upstream import AskedForward
from objectcache_schemas.delivery_paths import DeliveryPath
from objectcache_schemas.descriptor import DeliveryMode, Descriptor, OnMissing

DESCRIPTOR = Descriptor(("a", "b", "c"), 8, 16, 64, layers=(1, 7))
LANDED = AskedForward("bucket", DESCRIPTOR, None, "landed")


def asked(path: DeliveryPath | None = None, **fields: Any) -> AskedForward:
    return AskedForward("bucket", replace(DESCRIPTOR, **fields), path, "asked")


@pytest.mark.parametrize(
    "fields",
    [
        {"chunk_keys": ("a", "b")},
        {"chunk_keys": ("a", "c", "b")},
        {"num_layers": 9},
        {"chunk_tokens": 8},
        {"per_layer_chunk_bytes": 32},
    ],
)
def test_bucket_layout_and_keys_are_equal(fields: dict[str, Any]) -> None:
    assert LandedKey.of(asked(**fields)) != LandedKey.of(LANDED)
    assert LandedKey.of(replace(LANDED, bucket="other")) != LandedKey.of(LANDED)
    assert LandedKey.of(asked(layers=None, fingerprint="x")) == LandedKey.of(LANDED)


@pytest.mark.parametrize(
    ("layers", "may"),
    [((1, 7), True), ((2, 3), True), ((0, 7), False), ((1, 8), False), (None, False)],
)
def test_its_layers_are_among_those_that_land(layers: tuple[int, int] | None, may: bool) -> None:
    assert may_claim(asked(layers=layers), LANDED, has_arrived=True) is may


def test_a_path_that_it_forces_is_that_of_what_lands() -> None:
    forced = asked(DeliveryPath.AGG)
    assert not may_claim(forced, LANDED, has_arrived=True)
    assert may_claim(forced, replace(LANDED, path=DeliveryPath.AGG), has_arrived=True)


def test_a_rate_that_it_asks_for_is_its_own_and_not_that_of_what_lands() -> None:
    slow = asked(rate_bytes_per_s=1e6)
    assert not may_claim(slow, LANDED, has_arrived=True)
    assert not may_claim(asked(), slow, has_arrived=False)
    assert may_claim(asked(), slow, has_arrived=True)


@pytest.mark.parametrize(
    ("fields", "mode", "chunk_count", "has"),
    [
        ({}, DeliveryMode.LAYERWISE, 3, True),
        ({"layers": (2, 3)}, DeliveryMode.LAYERWISE, 3, True),
        ({"layers": (2, 3)}, DeliveryMode.CHUNKWISE, 3, False),
        ({}, DeliveryMode.CHUNKWISE, 3, True),
        ({"delivery": DeliveryMode.LAYERWISE}, DeliveryMode.CHUNKWISE, 3, False),
        ({"delivery": DeliveryMode.CHUNKWISE}, DeliveryMode.LAYERWISE, 3, False),
        ({"part": (1, 5)}, DeliveryMode.LAYERWISE, 3, True),
        ({"part": (1, 5)}, DeliveryMode.CHUNKWISE, 3, False),
        ({}, DeliveryMode.LAYERWISE, 2, False),
        ({"on_missing": OnMissing.TRUNCATE}, DeliveryMode.LAYERWISE, 2, True),
    ],
)
def test_what_lands_has_the_order_and_the_chunks_that_it_may_have(
    fields: dict[str, Any], mode: DeliveryMode, chunk_count: int, has: bool
) -> None:
    assert has_claimed(asked(**fields), LANDED, mode, chunk_count) is has
