"""When a connector leaves its store alone."""

from __future__ import annotations

import logging
from functools import partial

import pytest

from objectcache.connectors.store.outage import Outage
from objectcache.pause import PAUSE_MAX_S, PAUSE_MIN_S, Pause
from objectcache_schemas.errors import (
    Busy,
    Conflict,
    DeliveryFailed,
    NotFound,
    ObjectCacheError,
    Unavailable,
)

LOGGER = logging.getLogger("objectcache.connectors")


def raising(error: ObjectCacheError) -> int:
    raise error


def test_the_pause_doubles_up_to_its_bound_and_starts_anew_after_an_answer() -> None:
    pause, now_s, pauses = Pause(), 100.0, list[float]()
    for _ in range(8):
        assert pause.rest_s(now_s) == 0.0
        pause.failed("a lookup", now_s)
        pauses.append(pause.rest_s(now_s))
        now_s += pauses[-1]
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert (pauses[0], pauses[-1]) == (PAUSE_MIN_S, PAUSE_MAX_S)
    pause.answered("a lookup")
    pause.failed("a lookup", now_s)
    assert pause.rest_s(now_s) == PAUSE_MIN_S


def test_a_server_that_answers_lookups_and_fails_loads_is_left_alone_longer_and_longer() -> None:
    pause, now_s, pauses = Pause(), 0.0, list[float]()
    for _ in range(3):
        pause.answered("a lookup")
        pause.failed("a load", now_s)
        pauses.append(pause.rest_s(now_s))
        now_s += pauses[-1]
    assert pauses == [1.0, 2.0, 4.0]
    pause.answered("a load")
    pause.failed("a lookup", now_s)
    assert pause.rest_s(now_s) == PAUSE_MIN_S


def test_what_fails_within_a_pause_does_not_make_it_longer_unless_the_server_asks() -> None:
    pause = Pause()
    pause.failed("a load", 10.0)
    pause.failed("a load", 10.5)
    assert pause.rest_s(10.5) == 0.5
    pause.failed("a load", 10.5, least_s=7.0)
    assert pause.rest_s(10.5) == 7.0
    pause.failed("a load", 10.5, least_s=7200.0)
    assert pause.rest_s(10.5) == PAUSE_MAX_S


@pytest.mark.parametrize(
    "error",
    [Unavailable("down"), Busy("later", retry_after_s=3.0), DeliveryFailed("cut", layer=2)],
)
def test_after_a_failure_of_the_server_nothing_is_asked_of_it(error: ObjectCacheError) -> None:
    outage, asked = Outage(LOGGER), list[int]()
    with pytest.raises(type(error)):
        outage.call("a load", lambda: raising(error))
    assert outage.rest_s > 0.0
    with pytest.raises(Unavailable, match="left alone for another"):
        outage.call("a lookup", lambda: asked.append(1))
    assert outage.attempt("a lookup", lambda: 5, 0) == 0
    assert not asked
    assert outage.failure_count == 1


def test_a_miss_and_a_refusal_begin_no_pause(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage(LOGGER)
    with caplog.at_level(logging.WARNING):
        for error in (NotFound("gone"), Conflict("other bytes")):
            assert outage.attempt("a put", partial(raising, error), 7) == 7
    assert outage.rest_s == 0.0
    assert outage.attempt("a put", lambda: 3, 0) == 3
    assert outage.failure_count == 2
    assert len(caplog.messages) == 1, "a refusal a request would fill the log"


def test_the_log_says_what_failed_and_for_how_long_the_store_is_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outage = Outage(LOGGER)
    with caplog.at_level(logging.WARNING):
        outage.failed("a lookup", Busy("at its limit", retry_after_s=3.0))
        outage.failed("a load", Unavailable("no answer"))
    assert caplog.messages == [
        "a lookup failed (SlowDown): at its limit; the store is left alone for 3 s"
    ]
