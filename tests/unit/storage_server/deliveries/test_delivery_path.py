"""Every combination of a forced path, a delivery, a number of chunks and a target."""

from __future__ import annotations

from itertools import product

import pytest

from objectcache_schemas.delivery_paths import parse_path
from objectcache_schemas.descriptor import DeliveryMode
from objectcache_schemas.errors import InvalidRequest
from objectcache_storage_server.deliveries.delivery_path import forced_mode, is_body, path_taken

AUTO, LAYERWISE, CHUNKWISE = DeliveryMode.AUTO, DeliveryMode.LAYERWISE, DeliveryMode.CHUNKWISE
# (path, delivery) to the mode that is asked for, or the remedy in the refusal, whatever else is set
MODES: dict[tuple[str, DeliveryMode], DeliveryMode | str] = {
    ("", AUTO): AUTO,
    ("", LAYERWISE): LAYERWISE,
    ("", CHUNKWISE): CHUNKWISE,
    ("agg", AUTO): LAYERWISE,
    ("agg", LAYERWISE): LAYERWISE,
    ("agg", CHUNKWISE): "agg is layerwise, the descriptor's delivery is chunkwise",
    ("batch", AUTO): CHUNKWISE,
    ("batch", LAYERWISE): "batch is chunkwise, the descriptor's delivery is layerwise",
    ("batch", CHUNKWISE): CHUNKWISE,
    ("direct", AUTO): AUTO,
    ("direct", LAYERWISE): LAYERWISE,
    ("direct", CHUNKWISE): CHUNKWISE,
    ("buffer", AUTO): CHUNKWISE,
    ("buffer", LAYERWISE): LAYERWISE,
    ("buffer", CHUNKWISE): CHUNKWISE,
    ("s3tcp", AUTO): "plain GET",
    ("s3tcp", LAYERWISE): "plain GET",
    ("s3tcp", CHUNKWISE): "plain GET",
}


def wanted(
    path: str, delivery: DeliveryMode, chunk_count: int, has_target: bool
) -> DeliveryMode | str:
    if path in ("direct", "buffer") and not has_target:
        return "rdma_target"
    if path in ("direct", "buffer") and chunk_count != 1:
        return "use agg or batch"
    return MODES[path, delivery]


@pytest.mark.parametrize("chunk_count", [1, 2])
@pytest.mark.parametrize("has_target", [False, True])
def test_a_path_decides_the_mode_or_is_refused_with_a_remedy(
    chunk_count: int, has_target: bool
) -> None:
    for path, delivery in MODES:
        outcome = wanted(path, delivery, chunk_count, has_target)
        if isinstance(outcome, DeliveryMode):
            assert forced_mode(path, delivery, chunk_count, has_target) is outcome
            continue
        with pytest.raises(InvalidRequest, match=outcome) as refused:
            forced_mode(path, delivery, chunk_count, has_target)
        assert refused.value.code == "InvalidRequest"
        assert f"x-objectcache-path: {path} " in str(refused.value)


@pytest.mark.parametrize(
    ("mode", "chunk_count", "has_target", "path"),
    [
        (LAYERWISE, 1, True, "direct"),
        (CHUNKWISE, 1, True, "direct"),
        (LAYERWISE, 2, True, "agg"),
        (CHUNKWISE, 2, True, "batch"),
        (LAYERWISE, 1, False, "agg"),
        (CHUNKWISE, 1, False, "batch"),
        (LAYERWISE, 2, False, "agg"),
        (CHUNKWISE, 2, False, "batch"),
    ],
)
def test_a_path_that_nobody_forced_follows_from_what_is_delivered(
    mode: DeliveryMode, chunk_count: int, has_target: bool, path: str
) -> None:
    assert path_taken("", mode, chunk_count, has_target).value == path


def test_a_forced_path_is_the_one_that_is_taken() -> None:
    for path, mode in product(("buffer", "direct"), (LAYERWISE, CHUNKWISE)):
        assert path_taken(path, mode, 1, True).value == path
    for has_target in (False, True):
        assert path_taken("agg", LAYERWISE, 1, has_target).value == "agg"
        assert path_taken("batch", CHUNKWISE, 1, has_target).value == "batch"


def test_only_a_target_that_is_not_staged_is_written_by_the_storage_server() -> None:
    bodies = {
        (path, has_target)
        for path, has_target in product(("", "buffer", "direct", "batch", "agg"), (False, True))
        if is_body(path, has_target)
    }
    assert bodies == {("buffer", True)} | {
        (path, False) for path in ("", "buffer", "direct", "batch", "agg")
    }


@pytest.mark.parametrize("text", ["S3TCP", " agg", "agg,batch", "\r\nx: y", "rdma", "a" * 5000])
def test_an_unknown_path_is_refused_by_the_names_of_the_five_and_not_repeated(text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_path(text)
    assert str(refused.value) == (
        "x-objectcache-path must be one of s3tcp, buffer, direct, batch, agg"
    )
