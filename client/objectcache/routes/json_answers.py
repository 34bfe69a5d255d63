"""Answers in JSON that others may have written wrong."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from objectcache_schemas.errors import InvalidRequest

T = TypeVar("T")


def read_json(body: bytes, kind: type[T]) -> T:
    """The answer as a `kind`; raises `InvalidRequest` for whatever is none."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the answer makes no sense: {error}") from error
