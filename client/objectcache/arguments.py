"""Checks of what a caller passes, so that a mistake is told by the argument's name.

Each raises `InvalidRequest`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from objectcache_schemas.compute_windows import WINDOW_S_MAX
from objectcache_schemas.delivery_paths import DeliveryPath
from objectcache_schemas.descriptor import CONTEXT_TOKENS_MAX, RATE_MIN, DeliveryMode, OnMissing
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.layout import KvLayout

Choice = TypeVar("Choice", DeliveryMode, OnMissing, DeliveryPath)
NUMBERS = (int, float, np.integer, np.floating)
_PLAIN_KEYS = frozenset({str, bytes})  # without their subclasses, which are keys too
TIMEOUT_S_MAX = 2_000_000  # poll(2) counts milliseconds in a C int


def checked_keys(chunk_keys: Iterable[Any]) -> tuple[str, ...]:
    """A list of keys; one key alone, which is a sequence of characters too, is none."""
    if isinstance(chunk_keys, str | bytes | bytearray):
        raise InvalidRequest(
            f"chunk_keys must be a list of keys, got one {type(chunk_keys).__name__}"
        )
    try:
        keys = tuple(chunk_keys)
    except TypeError:
        raise InvalidRequest(
            f"chunk_keys must be a list of keys, got {type(chunk_keys).__name__}"
        ) from None
    if not _PLAIN_KEYS.issuperset(map(type, keys)):
        for index, key in enumerate(keys):
            if not isinstance(key, str | bytes):
                kind = type(key).__name__
                raise InvalidRequest(f"chunk_keys[{index}] must be a string, got {kind}")
    return keys


def checked_parent(parent_key: Any) -> str | None:
    """One key, or None."""
    if parent_key is not None and not isinstance(parent_key, str):
        raise InvalidRequest(f"parent_key must be a string, got {type(parent_key).__name__}")
    return parent_key


def checked_tokens(tokens: Any) -> bytes | npt.NDArray[np.integer]:
    """Token ids in one dimension; bytes are ids too, text is none."""
    if isinstance(tokens, bytes):
        return tokens
    try:
        ids = np.asarray(tokens)
    except (TypeError, ValueError) as error:  # rows of different lengths, say
        raise InvalidRequest(f"tokens must be one sequence of token ids: {error}") from error
    if ids.ndim != 1 or isinstance(tokens, str):
        raise InvalidRequest(
            f"tokens must be one sequence of token ids, got {type(tokens).__name__} "
            f"of {ids.ndim} dimensions"
        )
    return ids


def checked_layers(layers: Any, num_layers: int) -> tuple[int, int] | None:
    """A range [first, end) of a layout's layers, or None for all."""
    if layers is None:
        return None
    try:
        first, end = (operator.index(layer) for layer in layers)
    except (TypeError, ValueError):
        first, end = -1, -1
    if not 0 <= first < end <= num_layers:
        raise InvalidRequest(
            f"layers must be (first, end) with whole numbers 0 <= first < end <= {num_layers}, "
            f"got {layers!r}"
        )
    return first, end


def checked_seconds(name: str, value: Any) -> float:
    """A number of seconds above 0 that a socket takes as its timeout."""
    if not (isinstance(value, NUMBERS) and 0 < value <= TIMEOUT_S_MAX):
        raise InvalidRequest(
            f"{name} must be a number of seconds above 0, at most {TIMEOUT_S_MAX}, got {value!r}"
        )
    return float(value)


def checked_compute_s(name: str, value: Any) -> float | None:
    """A number of seconds from 0 to `WINDOW_S_MAX`, or None."""
    if value is None:
        return None
    is_number = isinstance(value, NUMBERS) and not isinstance(value, bool)
    if not (is_number and 0 <= value <= WINDOW_S_MAX):
        raise InvalidRequest(
            f"{name} must be a number of seconds from 0 to {WINDOW_S_MAX:g}, got {value!r:.40}"
        )
    return float(value)


def checked_token_count(name: str, value: Any) -> int | None:
    """How many tokens, of a prompt or a step; or None."""
    if value is None:
        return None
    count = checked_count(name, value)
    if count > CONTEXT_TOKENS_MAX:
        raise InvalidRequest(f"{name} must be at most {CONTEXT_TOKENS_MAX}, got {count}")
    return count


def checked_name(name: str, value: Any) -> str | None:
    """A name, or None; the descriptor checks its letters."""
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(f"{name} must be a string, got {type(value).__name__}")
    return value


def checked_rate(rate_bytes_per_s: Any) -> float | None:
    """A finite number of bytes per second, 1 or more, or None."""
    if rate_bytes_per_s is None:
        return None
    if not (isinstance(rate_bytes_per_s, NUMBERS) and RATE_MIN <= rate_bytes_per_s < math.inf):
        raise InvalidRequest(
            f"rate_bytes_per_s must be a finite number of bytes per second, {RATE_MIN} or more, "
            f"got {rate_bytes_per_s!r}"
        )
    return float(rate_bytes_per_s)


def checked_switch(name: str, value: Any) -> bool:
    """True or False, and no text that means one of them."""
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be True or False, got {value!r}")
    return value


def checked_count(name: str, value: Any) -> int:
    """A whole number, 1 or more."""
    try:
        count = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = 0
    if count < 1:
        raise InvalidRequest(f"{name} must be a whole number, 1 or more, got {value!r}")
    return count


def checked_choice(name: str, kind: type[Choice], text: Any) -> Choice:
    """One of an enum's words."""
    try:
        return kind(text)
    except ValueError:
        allowed = ", ".join(choice.value for choice in kind)
        raise InvalidRequest(f"{name} must be one of {allowed}, got {text!r}") from None


def check_layout(layout: Any) -> None:
    """A `KvLayout`, not something with the same fields."""
    if not isinstance(layout, KvLayout):
        raise InvalidRequest(f"layout must be a KvLayout, got {type(layout).__name__}")


def check_credential(name: str, value: Any) -> None:
    """Text that may stand in a header. The message never has the value."""
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} must be a string, got {type(value).__name__}")
    if not value or not value.isascii() or not value.isprintable():
        raise InvalidRequest(f"{name} must be printable ASCII, and not empty")
