"""What the vLLM connector tells the people who run it: lines of its log, errors, counts."""

from __future__ import annotations

import io
import logging

import pytest

from objectcache.connectors.vllm.reports.engine_log import log_through_engine, start_told
from objectcache.connectors.vllm.reports.engine_metrics import (
    COUNTERS,
    Increments,
    ObjectCacheStats,
)
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import MIB

FORMAT = "(Engine pid=7) %(levelname)s %(message)s"


class Loggers:
    """Ours, the engine's and the root, apart from the process's own."""

    def __init__(self) -> None:
        self.root = logging.RootLogger(logging.WARNING)
        manager = logging.Manager(self.root)
        self.own, self.engine = manager.getLogger("objectcache"), manager.getLogger("vllm")
        self.ours = manager.getLogger("objectcache.connectors.vllm")
        self.written = io.StringIO()

    def handler(self, level: int = logging.INFO) -> logging.Handler:
        handler = logging.StreamHandler(self.written)
        handler.setFormatter(logging.Formatter(FORMAT))
        handler.setLevel(level)
        return handler

    def configure_engine(self, level: int = logging.INFO) -> None:
        self.engine.handlers = [self.handler(level)]
        self.engine.setLevel(level)

    def attach(self) -> None:
        log_through_engine(self.own, self.engine, self.root)


@pytest.fixture
def loggers() -> Loggers:
    return Loggers()


def test_lines_come_out_as_the_engines_do_with_their_name(loggers: Loggers) -> None:
    loggers.configure_engine()
    loggers.attach()
    loggers.attach()
    loggers.ours.info("%d blocks", 3)
    loggers.ours.debug("too much")
    assert loggers.written.getvalue() == (
        "(Engine pid=7) INFO objectcache.connectors.vllm: 3 blocks\n"
    )


def test_an_engine_that_configures_its_log_anew_takes_our_lines_along(loggers: Loggers) -> None:
    loggers.configure_engine()
    loggers.attach()
    loggers.configure_engine(logging.WARNING)
    loggers.ours.info("too little")
    loggers.ours.warning("once")
    assert loggers.written.getvalue() == (
        "(Engine pid=7) WARNING objectcache.connectors.vllm: once\n"
    )


@pytest.mark.parametrize("configured", ["own", "root"])
def test_logging_that_somebody_has_configured_is_left_alone(
    loggers: Loggers, configured: str
) -> None:
    loggers.configure_engine()
    logger = loggers.own if configured == "own" else loggers.root
    logger.addHandler(handler := loggers.handler())
    loggers.attach()
    assert loggers.own.handlers == ([handler] if configured == "own" else [])
    assert loggers.own.level == logging.NOTSET
    assert loggers.own.propagate


def test_an_engine_without_a_log_of_its_own_is_left_alone(loggers: Loggers) -> None:
    loggers.attach()
    assert loggers.own.handlers == []


def test_a_level_that_was_chosen_for_our_lines_holds(loggers: Loggers) -> None:
    loggers.configure_engine()
    loggers.own.setLevel(logging.ERROR)
    loggers.attach()
    loggers.ours.warning("not wanted")
    assert loggers.written.getvalue() == ""


def test_what_keeps_an_engine_from_starting_is_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(InvalidRequest), start_told("The connector"):
        raise InvalidRequest("setting 'x' is unknown")
    assert caplog.messages == ["The connector cannot start: setting 'x' is unknown"]
    assert caplog.records[0].levelname == "ERROR"


def test_counts_are_told_once() -> None:
    increments = Increments()
    assert increments.take({"hits": 2, "loads": 0}) == {"hits": 2}
    assert increments.take({"hits": 2, "loads": 0}) == {}
    assert increments.take({"hits": 5, "loads": 1}) == {"hits": 3, "loads": 1}


def test_counts_of_ranks_and_steps_are_added() -> None:
    one, other = ObjectCacheStats({"loads": 1}), ObjectCacheStats({"loads": 2, "hits": 1})
    both = one.aggregate(other)
    assert both.data == {"loads": 3, "hits": 1}
    both.reset()
    assert both.is_empty()
    assert not other.is_empty()


def test_the_line_of_an_interval_has_what_was_counted_in_words_of_the_metrics() -> None:
    counted = {"loads": 2, "loaded_bytes": 3 * MIB, "load_seconds": 0.12345, "failed_loads": 0}
    shown = ObjectCacheStats(counted).reduce()
    assert shown == {"loads": 2, "loaded_mib": 3.0, "load_seconds": 0.123}
    assert set(counted) <= set(COUNTERS)
