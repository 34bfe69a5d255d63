"""What the engines are asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.scale_out.prefill_requests import made_up_requests, trace_requests
from objectcache_schemas.errors import InvalidRequest


def written(folder: Path, *lines: tuple[int, int, list[int]]) -> Path:
    file = folder / "trace.jsonl"
    keys = ("timestamp", "input_length", "hash_ids")
    file.write_text("".join(json.dumps(dict(zip(keys, one, strict=True))) + "\n" for one in lines))
    return file


def test_a_trace_is_repeated_with_other_blocks_at_the_rate_that_is_asked_for(
    tmp_path: Path,
) -> None:
    file = written(tmp_path, (0, 1100, [0, 1, 2]), (1000, 512, [0]), (4000, 1024, [0, 5]))
    requests = trace_requests(file, rate_per_s=3.0, until_s=1.9)
    assert [one.number for one in requests] == list(range(5))
    assert [one.at_s for one in requests] == pytest.approx([0, 0.25, 1, 1, 1.25])
    # a block that is not whole is not stored
    assert [one.blocks for one in requests[:4]] == [(0, 1), (0,), (0, 5), (6, 7)]


def test_a_trace_of_one_moment_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, (5, 512, [0]), (5, 512, [1]))
    with pytest.raises(InvalidRequest, match="two moments"):
        trace_requests(file, 1.0, 1.0)


def test_what_is_made_up_repeats_what_came_before_at_that_rate() -> None:
    requests = made_up_requests(100.0, 60.0, seed=0)
    assert requests == made_up_requests(100.0, 60.0, seed=0)
    assert 5000 < len(requests) < 7000
    seen: set[int] = set()
    found = 0
    for one in requests:
        found += len(one.blocks) > 1 and one.blocks[1] in seen
        seen.update(one.blocks)
    assert found > len(requests) / 3
