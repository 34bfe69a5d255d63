"""Checks of what a caller passes, so that a mistake is told by the argument's name.

Each raises `InvalidRequest`.
"""

from __future__ import annotations

import enum
import math
import operator
import ssl
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from objectcache_encodings.frames import ENCODINGS
from objectcache_schemas.compute_windows import WINDOW_S_MAX
from objectcache_schemas.descriptor import CONTEXT_TOKENS_MAX, RATE_MIN
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.layout import KvLayout

Choice = TypeVar("Choice", bound=enum.Enum)
NUMBERS = (int, float, np.integer, np.floating)
_PLAIN_KEYS = frozenset({str, bytes})  # without their subclasses, which are keys too
AUTO_ENCODINGS = ("auto",)  # the client chooses
AUTO_ENCODING = "auto"  # so of puts
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
    is_number = isinstance(value, NUMBERS) and not isinstance(value, bool)
    if not (is_number and 0 < value <= TIMEOUT_S_MAX):
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


def checked_rate(name: str, value: Any) -> float | None:
    """A finite number of bytes per second, `RATE_MIN` or more, or None."""
    if value is None:
        return None
    if not (isinstance(value, NUMBERS) and RATE_MIN <= value < math.inf):
        raise InvalidRequest(
            f"{name} must be a finite number of bytes per second, {RATE_MIN} or more, got {value!r}"
        )
    return float(value)


def checked_encodings(encodings: Any) -> tuple[str, ...]:
    """Encodings that there are, none of them for None, or `AUTO_ENCODINGS`; one name alone, which
    is a sequence of characters too, is none.
    """
    if encodings is None:
        return ()
    if encodings == AUTO_ENCODINGS or (isinstance(encodings, str) and encodings == "auto"):
        return AUTO_ENCODINGS
    names: tuple[Any, ...] = ()
    is_list = not isinstance(encodings, str | bytes)
    try:
        names = tuple(encodings) if is_list else ()
    except TypeError:
        is_list = False
    if not is_list or any(name not in ENCODINGS for name in names):
        raise InvalidRequest(
            f"encodings must be auto, or a list of {', '.join(ENCODINGS)}, got {encodings!r:.80}"
        )
    return names


def checked_encoding(name: str, encoding: Any) -> str:
    """An encoding that there is, `AUTO_ENCODING`, or "" for none, as of None."""
    if encoding is None:
        return ""
    if isinstance(encoding, str) and encoding in ("", AUTO_ENCODING, *ENCODINGS):
        return encoding
    raise InvalidRequest(
        f"{name} must be auto, {', '.join(ENCODINGS)}, or empty for none, got {encoding!r:.80}"
    )


def listed(text: str) -> list[str]:
    """What stands between commas; nothing of an empty text."""
    return [one.strip() for one in text.split(",")] if text.strip() else []


def nic_rate_of(environment: Mapping[str, str]) -> float | None:
    """OBJECTCACHE_NIC_BYTES_PER_S, or None where it is not set."""
    text = environment.get("OBJECTCACHE_NIC_BYTES_PER_S")
    if not text:
        return None
    try:
        return checked_rate("OBJECTCACHE_NIC_BYTES_PER_S", float(text))
    except ValueError:
        raise InvalidRequest(
            f"OBJECTCACHE_NIC_BYTES_PER_S must be a number of bytes per second, got {text!r:.40}"
        ) from None


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


def checked_zero_or_more(name: str, value: Any) -> int:
    """A whole number, 0 or more."""
    is_zero = not isinstance(value, bool) and value == 0
    return 0 if is_zero else checked_count(name, value)


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


def check_tls(tls: Any) -> None:
    """What connections are made with, or None; the name of a file is neither."""
    if not isinstance(tls, ssl.SSLContext | None):
        raise InvalidRequest(f"tls must be an ssl.SSLContext, got {type(tls).__name__}")


def check_credential(name: str, value: Any) -> None:
    """Text that may stand in a header. The message never has the value."""
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} must be a string, got {type(value).__name__}")
    if not value or not value.isascii() or not value.isprintable():
        raise InvalidRequest(f"{name} must be printable ASCII, and not empty")
