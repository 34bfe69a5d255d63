"""Questions that are shared: everybody's answer is to a question that was put later."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from objectcache_schemas.errors import Unavailable
from objectcache_storage_server.engines.blobs.blob_store import StoreTimeout
from objectcache_storage_server.engines.shared.log.shared_question import SharedQuestion
from tests.unit.storage_server.engines.shared.catalogs import soon, until


class Asked:
    """Answers with the number of the question, when it is allowed to."""

    def __init__(self) -> None:
        self.count = 0
        self.may_answer = threading.Event()
        self.fails = False

    def __call__(self, deadline_s: float) -> int:
        self.count += 1
        number = self.count
        assert self.may_answer.wait(60)
        if self.fails:
            self.fails = False
            raise Unavailable("on purpose")
        return number


def test_who_asks_while_a_question_is_under_way_shares_the_next_one() -> None:
    asked = Asked()
    question = SharedQuestion(asked, "ask")
    with ThreadPoolExecutor(9) as threads:
        first = threads.submit(question.answer, soon())
        until(lambda: asked.count == 1)
        others = [threads.submit(question.answer, soon()) for _ in range(8)]
        until(lambda: len(question._changed._waiters) == 8)  # type: ignore[attr-defined]
        asked.may_answer.set()
        assert first.result() == 1
        assert [other.result() for other in others] == [2] * 8
    assert asked.count == 2


def test_a_question_that_fails_fails_for_whoever_put_it() -> None:
    asked = Asked()
    asked.fails = True
    question = SharedQuestion(asked, "ask")
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(question.answer, soon())
        until(lambda: asked.count == 1)
        second = threads.submit(question.answer, soon())
        asked.may_answer.set()
        with pytest.raises(Unavailable, match="on purpose"):
            first.result()
        assert second.result() == 2


def test_nobody_waits_longer_than_the_deadline() -> None:
    asked = Asked()
    question = SharedQuestion(asked, "ask the store")
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(question.answer, soon())
        until(lambda: asked.count == 1)
        with pytest.raises(StoreTimeout, match="ask the store"):
            question.answer(time.monotonic() + 0.02)
        asked.may_answer.set()
        assert first.result() == 1
