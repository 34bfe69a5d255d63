"""A put that travels in one message is no mere opening: it is never sent twice."""

from __future__ import annotations

from objectcache_schemas.limits import Limits
from objectcache_schemas.messages.message import is_repeatable
from objectcache_schemas.messages.reads import OpenObject
from objectcache_schemas.messages.writes import CommitPut, PutObject


def test_a_put_that_brings_its_data_is_not_repeated() -> None:
    opening = PutObject(bucket="b", key="k", size_bytes=4)
    whole = PutObject(bucket="b", key="k", size_bytes=4, data=b"data", commit=CommitPut())
    assert is_repeatable(opening, Limits())
    assert not is_repeatable(whole, Limits())


def test_a_get_that_asks_for_the_bytes_is_repeated() -> None:
    assert is_repeatable(OpenObject(bucket="b", key="k", body_bytes_max=4096), Limits())
