"""The parts of the SGLang connectors that need no SGLang: layouts, windows, names, settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest

from objectcache.connectors.sglang.hicache import ObjectCacheHiCache
from objectcache.connectors.sglang.host_layouts import (
    MHA_LAYOUTS,
    MLA_LAYOUTS,
    PageGeometry,
    pages_view,
)
from objectcache.connectors.sglang.host_pool import page_starts
from objectcache.connectors.sglang.page_source import HostPages, fill_page
from objectcache.connectors.sglang.served_model import identity_of
from objectcache.connectors.sglang.settings import Rank, read_settings
from objectcache.connectors.sglang.trailing_pages import MATCHES_MAX, longest_prefix
from objectcache_schemas.errors import InvalidRequest, Unavailable

# All sizes differ, so that no two axes can be exchanged unnoticed.
MHA = PageGeometry(
    num_layers=3, components=2, page_tokens=4, head_groups=2, heads_per_group=5, head_bytes=6
)
MLA = PageGeometry(
    num_layers=3, components=1, page_tokens=4, head_groups=1, heads_per_group=1, head_bytes=7
)
PAGES = 8


def position(layout: str, geometry: PageGeometry, where: tuple[int, ...]) -> int:
    """Where SGLang has one byte: its own shapes, written out as nested sums."""
    page, layer, component, token, group, head, byte = where
    layers, components, tokens, groups, heads, width = geometry.chunk_shape
    all_heads, flat_head = groups * heads, group * heads + head
    slots, slot = PAGES * tokens, page * tokens + token
    if layout == "layer_first":
        row = (component * layers + layer) * slots + slot
    elif layout == "page_first":
        row = (component * slots + slot) * layers + layer
    elif layout == "page_first_direct":
        row = ((component * PAGES + page) * layers + layer) * tokens + token
    elif layout == "page_head":
        row = ((component * PAGES + page) * all_heads + flat_head) * tokens + token
        return (row * layers + layer) * width + byte
    else:
        row = (((page * groups + group) * layers + layer) * components + component) * tokens + token
        return (row * heads + head) * width + byte
    return (row * all_heads + flat_head) * width + byte


@pytest.mark.parametrize(
    ("geometry", "layout"), [*product([MHA], MHA_LAYOUTS), *product([MLA], MLA_LAYOUTS)]
)
def test_a_view_finds_every_byte_where_the_layout_has_it(
    geometry: PageGeometry, layout: str
) -> None:
    memory = (np.arange(PAGES * geometry.page_bytes) % 251).astype(np.uint8)
    view = pages_view(memory, layout, geometry)
    assert view.shape == (PAGES, *geometry.chunk_shape)
    assert np.shares_memory(view, memory)
    for where in np.ndindex(view.shape):
        assert view[where] == memory[position(layout, geometry, where)], where


def test_filling_a_page_changes_that_page_alone() -> None:
    memory = np.zeros(PAGES * MHA.page_bytes, np.uint8)
    chunk = np.arange(MHA.page_bytes).astype(np.uint8).reshape(MHA.num_layers, MHA.layer_bytes)
    view = pages_view(memory, "page_head", MHA)
    fill_page([view[5]], chunk)
    read = np.empty((1, *chunk.shape), np.uint8)
    HostPages([[view[5]]]).read(0, 1, read)
    assert np.array_equal(read[0], chunk)
    assert not view[4].any()
    assert not view[6].any()


def test_pages_that_lie_as_chunks_are_stored_from_where_they_lie() -> None:
    one_group = PageGeometry(3, 2, 4, 1, 10, 6)
    memory = np.zeros(PAGES * MHA.page_bytes, np.uint8)
    for layout, geometry, direct in (
        ("page_unified", one_group, True),
        ("page_unified", MHA, False),
        ("page_first_direct", MHA, False),
        ("page_first", one_group, False),
    ):
        page = pages_view(memory, layout, geometry)[2]
        views = HostPages([[page]]).views(0, 1)
        assert (views is not None) == direct


def test_memory_that_is_not_whole_pages_and_unknown_layouts_are_refused() -> None:
    memory = np.zeros(2 * MHA.page_bytes, np.uint8)
    with pytest.raises(InvalidRequest, match="whole pages"):
        pages_view(memory[:-1], "page_first", MHA)
    with pytest.raises(InvalidRequest, match="page_first_kv_split"):
        pages_view(memory, "page_first_kv_split", MHA)
    with pytest.raises(InvalidRequest, match="page_head"):
        pages_view(np.zeros(MLA.page_bytes, np.uint8), "page_head", MLA)


@pytest.mark.parametrize(
    "slots",
    [[0, 1, 2], [1, 2, 3, 4], [0, 1, 3, 2], [0, 1, 2, 7], [32, 33, 34, 35], [-4, -3, -2, -1]],
)
def test_slots_that_are_no_pages_of_the_pool_are_refused(slots: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="slots"):
        page_starts(slots, 4, PAGES)


def test_slots_of_pages_in_any_order_are_taken() -> None:
    assert page_starts([28, 29, 30, 31, 4, 5, 6, 7], 4, PAGES) == [28, 4]


@pytest.mark.parametrize(
    ("stored", "window", "longest"),
    [
        ("abcdef", 2, 6),
        ("ef", 2, 6),
        ("de", 2, 5),
        ("f", 2, 0),
        ("abdf", 2, 2),
        ("a", 2, 1),
        ("a", 1, 1),
        ("", 3, 0),
        ("bcde", 9, 0),
    ],
)
def test_the_longest_prefix_ends_with_a_window_that_is_stored(
    stored: str, window: int, longest: int
) -> None:
    def match(keys: Sequence[str]) -> int:
        return next((n for n, key in enumerate(keys) if key not in stored), len(keys))

    assert longest_prefix("abcdef", window, match) == longest


def test_a_prefix_with_many_holes_is_a_miss_after_a_bounded_number_of_matches() -> None:
    asked: list[int] = []

    def match(keys: Sequence[str]) -> int:
        asked.append(len(keys))
        return 0

    assert longest_prefix(["key"] * 1000, 1, match) == 0
    assert len(asked) == MATCHES_MAX


def test_ranks_are_counted_from_the_outermost_split_inwards() -> None:
    assert Rank.of((1, 2), (0, 1), (3, 4)) == Rank(7, 8)
    assert Rank.of((1, 2), (0, 1), (0, 1)) == Rank(1, 2)


@dataclass
class Arguments:
    """The parts of SGLang's server arguments that these tests set."""

    model_path: str = "org/model"
    served_model_name: str = "prod"
    revision: str | None = None
    quantization: str | None = None
    json_model_override_args: str = "{}"
    load_format: str = "auto"


def test_the_model_is_what_was_loaded_and_how_and_not_its_alias() -> None:
    environment = {"HF_HOME": "/nowhere"}
    plain = identity_of(Arguments(), "r1", environment)
    assert (plain.model, plain.weights_revision) == ("org/model", "r1")
    assert identity_of(Arguments(served_model_name="other"), "r1", environment) == plain
    others = [
        Arguments(model_path="org/model-instruct"),
        Arguments(quantization="fp8"),
        Arguments(load_format="dummy"),
        Arguments(json_model_override_args='{"rope_scaling": {"factor": 4}}'),
    ]
    identities = {identity_of(other, "r1", environment) for other in others}
    assert len(identities | {plain, identity_of(Arguments(), "r2", environment)}) == 6
    by_revision = {identity_of(Arguments(revision=name), "", environment) for name in ("a", "b")}
    assert len(by_revision) == 2
    with pytest.raises(InvalidRequest, match="--model-path"):
        identity_of(Arguments(model_path=""), "r1", environment)


def test_settings_leave_sglangs_own_keys_alone_and_wait_briefly() -> None:
    extra = {
        "backend_name": "objectcache",
        "interface_v1": 1,
        "endpoint": "http://127.0.0.1:9000",
        "bucket": "kv-cache",
        "access_key": "AK",
        "secret_key": "SK",
    }
    settings = read_settings(extra)
    assert (settings.endpoint, settings.bucket, settings.timeout_s) == (
        "http://127.0.0.1:9000",
        "kv-cache",
        5.0,
    )
    assert settings.lookup_timeout_s == 0.5
    assert read_settings({**extra, "timeout_s": 1.5}).timeout_s == 1.5
    assert read_settings({**extra, "lookup_timeout_s": 2}).lookup_timeout_s == 2
    with pytest.raises(InvalidRequest, match="'lookup_timeout_s' must be seconds"):
        read_settings({**extra, "lookup_timeout_s": True})
    with pytest.raises(InvalidRequest, match="bukcet"):
        read_settings({**extra, "bukcet": "kv"})


def test_without_sglang_the_backend_says_what_is_missing() -> None:
    try:
        import sglang  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        with pytest.raises(Unavailable, match="needs sglang"):
            ObjectCacheHiCache(None)
