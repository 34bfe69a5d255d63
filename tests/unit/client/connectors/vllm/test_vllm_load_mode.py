"""When the vLLM connector loads: as it is told, or as vLLM's recovery allows."""

from __future__ import annotations

import logging
import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from objectcache.connectors.store.load_budget import LoadBudget
from objectcache.connectors.vllm.before_schedule.parked_requests import ParkedRequests
from objectcache.connectors.vllm.load_mode import EngineSteps, LoadMode, chosen_mode, tell_mode
from objectcache.connectors.vllm.plans import LoadPlan
from objectcache.connectors.vllm.settings import VllmSettings
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import MIB

IN_TURN = EngineSteps(asynchronous=False, pipeline_ranks=1, second_runner=False)
DANGEROUS = [
    (EngineSteps(asynchronous=True, pipeline_ranks=1, second_runner=False), "the engine may end"),
    (EngineSteps(asynchronous=False, pipeline_ranks=2, second_runner=False), "pipeline ranks"),
    (EngineSteps(asynchronous=False, pipeline_ranks=1, second_runner=True), "V2 model runner"),
]


def config(**chosen: Any) -> Any:
    """vLLM's configuration, as far as it is read."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=chosen.get("asynchronous")),
        parallel_config=SimpleNamespace(pipeline_parallel_size=chosen.get("ranks", 1)),
        **({"use_v2_model_runner": chosen["second"]} if "second" in chosen else {}),
    )


def test_what_vllm_does_not_say_counts_as_not_so() -> None:
    assert EngineSteps.of(config()) == IN_TURN
    assert EngineSteps.of(config(asynchronous=True, ranks=2, second=True)) == EngineSteps(
        asynchronous=True, pipeline_ranks=2, second_runner=True
    )


def test_steps_in_turn_are_undone_rightly(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert chosen_mode(LoadMode.AUTO, IN_TURN) is LoadMode.LAYERWISE
    tell_mode(LoadMode.AUTO, IN_TURN)
    (line,) = caplog.records
    assert line.levelno == logging.INFO
    assert "load_mode is layerwise" in line.getMessage()
    assert "before_schedule" in line.getMessage()


@pytest.mark.parametrize(("steps", "danger"), DANGEROUS)
def test_where_vllm_would_go_wrong_auto_loads_first(
    steps: EngineSteps, danger: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert chosen_mode(LoadMode.AUTO, steps) is LoadMode.BEFORE_SCHEDULE
    tell_mode(LoadMode.AUTO, steps)
    (line,) = caplog.records
    assert line.levelno == logging.INFO
    assert danger in line.getMessage()


@pytest.mark.parametrize(("steps", "danger"), DANGEROUS)
def test_who_asks_for_layers_there_is_warned_of_what_may_go_wrong(
    steps: EngineSteps, danger: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert chosen_mode(LoadMode.LAYERWISE, steps) is LoadMode.LAYERWISE
    tell_mode(LoadMode.LAYERWISE, steps)
    (line,) = caplog.records
    assert line.levelno == logging.WARNING
    assert danger in line.getMessage()


def test_per_request_it_is_chosen_only_where_vllm_undoes_rightly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    assert chosen_mode(LoadMode.PER_REQUEST, IN_TURN) is LoadMode.PER_REQUEST
    tell_mode(LoadMode.PER_REQUEST, IN_TURN)
    for steps, _ in DANGEROUS:
        assert chosen_mode(LoadMode.PER_REQUEST, steps) is LoadMode.BEFORE_SCHEDULE
        tell_mode(LoadMode.PER_REQUEST, steps)
    chosen, *others = [record.getMessage() for record in caplog.records]
    assert "load_mode is per_request" in chosen
    for line, (_, danger) in zip(others, DANGEROUS, strict=True):
        assert "load_mode is before_schedule" in line
        assert danger in line


@pytest.mark.parametrize("setting", [LoadMode.LAYERWISE, LoadMode.BEFORE_SCHEDULE])
def test_a_mode_that_was_chosen_and_is_right_needs_no_line(
    setting: LoadMode, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert chosen_mode(setting, IN_TURN) is setting
    tell_mode(setting, IN_TURN)
    assert caplog.records == []


def test_a_mode_that_is_none_is_refused() -> None:
    for wrong in ("early", True, None):
        with pytest.raises(
            InvalidRequest, match="auto, layerwise, before_schedule, per_request, got"
        ):
            VllmSettings(load_mode=wrong)  # type: ignore[arg-type]


# --- requests that wait for their KV ---


def load_of(name: str, blocks: int = 4) -> LoadPlan:
    ids = tuple(range(blocks))
    return LoadPlan(name, ids, tuple(bytes([number]) for number in ids), 100, "w")


def budget() -> LoadBudget:
    return LoadBudget(4 * MIB, 512 << 10)


def test_memory_is_promised_until_every_rank_is_through() -> None:
    promised = budget()
    parked = ParkedRequests(promised)
    promised.take(4)
    parked.park(load_of("r"))
    assert parked.take() == ((load_of("r"),), ())
    assert not promised.has_room(8)
    parked.failed({2})
    assert not promised.has_room(8)
    parked.ended(["r", "another"])
    assert promised.has_room(8)


def test_who_is_gone_is_given_up_once_and_who_is_not_loading_never() -> None:
    parked = ParkedRequests(budget())
    parked.park(load_of("r"))
    parked.take()
    parked.give_up("r")
    parked.give_up("other")
    assert parked.take() == ((), ("r",))
    assert parked.take() == ((), ())


def test_what_is_outdated_is_held_until_it_failed_or_was_evicted() -> None:
    parked = ParkedRequests(budget())
    for name in ("fails", "comes", "is cut", "is gone"):
        first = ord(name[-1])
        ids = (first, first + 1)
        parked.park(LoadPlan(name, ids, (b"a", b"b"), 100, "w"))
    assert not parked.holds_outdated()
    parked.outdate()
    assert set(parked.take()[1]) == {"fails", "comes", "is cut", "is gone"}
    parked.failed({ord("s"), ord("t") + 1})
    parked.ended(["fails", "comes", "is cut"])
    parked.give_up("is gone")
    parked.scheduled(["comes"])
    assert parked.holds_outdated()
    parked.scheduled(["is cut"])
    assert not parked.holds_outdated()


# --- the page ---


def test_every_setting_of_the_connector_is_documented() -> None:
    page = (Path(__file__).parents[5] / "docs" / "vllm.md").read_text("utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    told = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    own = {entry.name for entry in fields(VllmSettings)}
    assert own <= told
