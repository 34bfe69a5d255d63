"""The generator has the columns of Table 2, models those of Table 1, and files become turns."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from objectcache_laboratory.cluster.models import MODELS, TABLE_1, model_named
from objectcache_laboratory.cluster.trace_files import read_trajectories
from objectcache_laboratory.cluster.trajectories import (
    TRACES,
    TraceShape,
    Trajectory,
    generate,
    replayed,
    table_2,
)
from objectcache_schemas.errors import InvalidRequest

AGENTIC = Path(__file__).parents[5] / "shared" / "traces" / "agentic"


@pytest.mark.parametrize("shape", TRACES.values(), ids=TRACES)
@pytest.mark.parametrize("seed", [0, 1])
def test_five_hundred_trajectories_have_table_2s_columns(shape: TraceShape, seed: int) -> None:
    found = table_2(generate(shape, 500, seed))
    paper = (shape.turns, shape.append, shape.generate, shape.total, shape.context)
    assert found == pytest.approx(paper, rel=0.03)


@pytest.mark.parametrize("shape", TRACES.values(), ids=TRACES)
def test_each_turn_has_all_tokens_before_it_cached(shape: TraceShape) -> None:
    for trajectory in generate(shape, 40, 3):
        grown = trajectory.turns[:, 1:].sum(axis=1)
        assert trajectory.turns[0, 0] == 0
        assert np.array_equal(trajectory.turns[1:, 0], np.cumsum(grown)[:-1])
        assert trajectory.turns[:, 1:].min() >= 1
        assert trajectory.total_tokens == grown.sum()


def test_the_same_seed_gives_the_same_trajectories_and_another_others() -> None:
    first, again, other = (generate(TRACES["32K"], 5, seed) for seed in (7, 7, 8))
    assert all(np.array_equal(a.turns, b.turns) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a.turns, b.turns) for a, b in zip(first, other, strict=True))


def test_scaled_appends_cut_the_trajectory_at_the_limit() -> None:
    trajectory = Trajectory(np.array([[0, 100, 10], [110, 20, 10], [140, 20, 10]], np.int32))
    doubled = trajectory.scaled(append=2, generate=0.5, tokens_max=270)
    assert doubled.turns.tolist() == [[0, 200, 5], [205, 40, 5]]
    cut = trajectory.scaled(append=2, generate=1, tokens_max=50)
    assert cut.turns.tolist() == [[0, 50, 10]]


@pytest.mark.parametrize("name", TABLE_1)
def test_models_read_what_table_1_says_for_each_pflop(name: str) -> None:
    model = MODELS[name]
    found = (model.gbytes_per_pflop(16_384), model.gbytes_per_pflop(65_536))
    assert found == pytest.approx(TABLE_1[name], rel=0.15)


def test_a_model_that_is_not_known_is_refused_with_those_that_are() -> None:
    with pytest.raises(InvalidRequest, match="'gpt5' is not known; one of ds660b, ds27b"):
        model_named("gpt5")


def test_mooncake_rows_of_a_session_are_turns_of_an_agent(tmp_path: Path) -> None:
    rows = [
        {"session_id": "a", "input_length": 1100, "output_length": 50, "hash_ids": [1, 2, 3]},
        {"timestamp": 3, "input_length": 600, "output_length": 7, "hash_ids": [1, 9]},
        {
            "session_id": "a",
            "delay": 1500,
            "input_length": 1700,
            "output_length": 0,
            "hash_ids": [1, 2, 4, 5],
        },
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    session, single = read_trajectories(file, 10)
    assert session.turns.tolist() == [[0, 1100, 50], [1024, 676, 1]]
    assert session.delays_s is not None
    assert session.delays_s.tolist() == [0, 1.5]
    assert single.turns.tolist() == [[0, 600, 7]]  # other sessions' blocks are not its own
    assert len(read_trajectories(file, 1)) == 1


def test_sub_agents_requests_are_turns_in_their_place(tmp_path: Path) -> None:
    nested = [{"in": 70, "out": 3, "hash_ids": [8, 9], "think_time": 0.5}]
    document = {
        "block_size": 64,
        "requests": [
            {"t": 0, "in": 130, "out": 20, "hash_ids": [1, 2, 3]},
            {"t": 1, "type": "subagent", "requests": nested},
            {"t": 2, "in": 128, "out": 4, "hash_ids": [1, 2], "think_time": 2},
        ],
    }
    (tmp_path / "one.json").write_text(json.dumps(document))
    (found,) = read_trajectories(tmp_path, 10)
    # All blocks of the last are cached, and still one token is computed.
    assert found.turns.tolist() == [[0, 130, 20], [0, 70, 3], [127, 1, 4]]
    assert found.delays_s is not None
    assert found.delays_s.tolist() == [0, 0.5, 2]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", '{"input_length": 0, "output_length": 1, "hash_ids": []}', "line 1: .*length"),
        ("a.jsonl", "\n", "holds no row"),
        ("a.json", '{"block_size": 64, "requests": []}', "has no request"),
        ("a.json", '{"requests": []}', "block_size"),
        ("folder", None, r"has no \*.json"),
        ("missing.json", None, "No such file"),
    ],
)
def test_wrong_files_are_named_with_what_is_wrong(
    tmp_path: Path, name: str, content: str | None, words: str
) -> None:
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
    elif content is not None:
        path.write_text(content)
    with pytest.raises(InvalidRequest, match=words) as error:
        read_trajectories(path, 5)
    assert str(path) in error.value.message


def test_real_agentic_trajectories_hit_nearly_all_of_their_context() -> None:
    if not AGENTIC.is_dir():
        pytest.skip("no real trajectories: ../shared/traces/agentic is not there")
    found = read_trajectories(AGENTIC, 20)
    turns = np.concatenate([each.turns for each in found]).astype(np.int64)
    assert len(found) == 20
    assert turns[:, 0].sum() / turns[:, :2].sum() > 0.9


def test_more_agents_than_the_trace_has_trajectories_replay_the_same_again() -> None:
    once, much = replayed(TRACES["32K"], 500, 1), replayed(TRACES["32K"], 1_250, 1)
    counted = Counter(id(each) for each in much)
    assert len(counted) == 500
    assert set(counted.values()) == {2, 3}
    assert max(len(each.turns) for each in much) == max(len(each.turns) for each in once)
    assert table_2(much).total == pytest.approx(table_2(once).total, rel=0.01)
    assert len(replayed(TRACES["32K"], 7, 1)) == 7
