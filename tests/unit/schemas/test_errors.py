"""The error table is complete, and errors survive the wire."""

from __future__ import annotations

import msgspec
import pytest

from objectcache_schemas.errors import ERRORS, NotFound, ObjectCacheError, Retry, WireError


def subclasses(error_class: type[ObjectCacheError]) -> list[type[ObjectCacheError]]:
    """The classes of the schemas: what a process derives for itself never crosses a wire."""
    found = [error_class]
    for subclass in error_class.__subclasses__():
        if subclass.__module__ == ObjectCacheError.__module__:
            found += subclasses(subclass)
    return found


@pytest.mark.parametrize("error_class", subclasses(ObjectCacheError))
def test_every_class_has_a_row_for_its_default_code(error_class: type[ObjectCacheError]) -> None:
    assert ERRORS[error_class.default_code].error_class is error_class


@pytest.mark.parametrize("code", sorted(ERRORS))
def test_every_row_makes_an_error_that_survives_the_wire(code: str) -> None:
    row = ERRORS[code]
    assert row.code == code
    assert 400 <= row.http_status < 600
    error = row.error_class("why", code=code, missing_index=3, retry_after_s=1.5)
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(error.to_wire()), type=WireError)
    back = ObjectCacheError.from_wire(wire)
    assert type(back) is row.error_class
    assert (back.code, back.message, back.details) == (code, "why", error.details)


def test_an_unknown_code_from_a_later_version_is_still_an_error() -> None:
    error = ObjectCacheError.from_wire(WireError("NewCode", "news"))
    assert (error.code, str(error)) == ("InternalError", "NewCode: news")


def test_a_caller_can_tell_a_miss_from_a_busy_server() -> None:
    assert ERRORS["NoSuchKey"].retry is Retry.ELSEWHERE
    assert ERRORS["SlowDown"].retry is Retry.SAME
    assert repr(NotFound("gone")) == "<NotFound NoSuchKey: gone>"
