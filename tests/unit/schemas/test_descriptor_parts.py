"""A part of a prefix: what a descriptor says of it, and where its layers lie in the target."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from objectcache_schemas.descriptor import DeliveryMode, Descriptor, MemoryTarget
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import Limits

LIMITS = Limits()
TARGET = MemoryTarget(
    transport="shared_memory", target_id=bytes(16), offset_bytes=0, length_bytes=1000, tag=1
)


def descriptor(**changes: Any) -> Descriptor:
    whole = Descriptor(("c", "d"), 4, 16, 8, DeliveryMode.LAYERWISE, part=(2, 5))
    return replace(whole, **changes)


def test_a_part_goes_over_the_wire_and_is_left_out_where_there_is_none() -> None:
    asked = descriptor(rdma_target=TARGET)
    assert Descriptor.from_bytes(asked.to_bytes(), LIMITS) == asked
    assert b"part" not in replace(asked, part=None).to_bytes()


@pytest.mark.parametrize("part", [(4, 5), (-1, 5), (0, 1), (0, 0), (0, 1 << 41)])
def test_a_part_that_its_chunks_are_not_in_is_refused(part: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequest, match="part"):
        descriptor(part=part)


def test_a_part_is_of_no_more_chunks_than_a_descriptor_may_have() -> None:
    most = LIMITS.chunks_per_descriptor_max
    assert Descriptor.from_bytes(descriptor(part=(2, most)).to_bytes(), LIMITS).part == (2, most)
    for count in (most + 1, 1 << 40):
        with pytest.raises(InvalidRequest, match=rf"part\[1\] .*{most}"):
            Descriptor.from_bytes(descriptor(part=(2, count)).to_bytes(), LIMITS)


def test_an_encoded_put_of_some_layers_is_refused_by_the_layers() -> None:
    put = descriptor(part=None, layers=(0, 1), encoded_bytes=10)
    with pytest.raises(InvalidRequest, match="layers must be nil"):
        Descriptor.from_bytes(put.to_bytes(), LIMITS, of_put=True)


def test_a_part_is_of_a_get_and_goes_into_a_target_layer_by_layer() -> None:
    with pytest.raises(InvalidRequest, match="part must be nil in a put"):
        Descriptor.from_bytes(descriptor().to_bytes(), LIMITS, of_put=True)
    for mode in (DeliveryMode.AUTO, DeliveryMode.CHUNKWISE):
        with pytest.raises(InvalidRequest, match="must be layerwise"):
            descriptor(rdma_target=TARGET, delivery=mode)


def test_windows_are_of_the_whole_prefix() -> None:
    assert descriptor().window_chunks(2) == 5
    assert descriptor(part=None).window_chunks(2) == 2


def test_rows_of_all_parts_fill_the_target_of_the_whole() -> None:
    layers, slice_bytes, count = 3, 8, 5
    target = np.zeros(layers * count * slice_bytes, np.uint8)
    for first, keys in ((0, ("a", "b")), (2, ("c",)), (3, ("d", "e"))):
        part = Descriptor(keys, layers, 16, slice_bytes, part=(first, count))
        rows = part.target_rows(len(keys))
        assert rows is not None
        payload_bytes = part.payload_bytes(len(keys))
        for offset in range(0, payload_bytes, slice_bytes // 2):
            at = rows.place_bytes(offset)
            target[at : at + slice_bytes // 2] += 1
        assert rows.end_bytes(payload_bytes) == target.size - (count - first - len(keys)) * 8
    assert (target == 1).all()
    assert descriptor(part=None).target_rows(2) is None
