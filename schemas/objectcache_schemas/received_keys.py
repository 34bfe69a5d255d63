"""Chunk keys as an untrusted peer sends them: counted before any of them is made. Pure.

A byte of msgpack can become an object of 60 bytes, so what is no key is never built: the array is
refused by the count in its header, and an element that is itself an array or a map by its own.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from objectcache_schemas.errors import InvalidRequest

# The first byte of an array: its count in the low half, or in the bytes that follow.
_FIXARRAY, _FIXARRAY_END = 0x90, 0xA0
_COUNT_BYTES: Final = {0xDC: 2, 0xDD: 4}
_FIXMAP, _FIXMAP_END = 0x80, 0x90
_MAPS: Final = frozenset({0xDE, 0xDF})

_TEXTS: Final = msgspec.msgpack.Decoder(tuple[str, ...])
_RAWS: Final = msgspec.msgpack.Decoder(tuple[msgspec.Raw, ...])
_SCALAR: Final = msgspec.msgpack.Decoder()


def received_keys(raw: msgspec.Raw, chunks_max: int) -> tuple[Any, ...]:
    """The elements of `chunk_keys`, at most `chunks_max`; no key yet, but what could be checked.

    Raises `InvalidRequest` (InvalidDescriptor, DescriptorTooLarge) and what msgspec does.
    """
    count = array_count(raw)
    if count is None:
        raise InvalidRequest("chunk_keys must be an array", code="InvalidDescriptor")
    check_count(count, chunks_max)
    try:
        return _TEXTS.decode(raw)
    except msgspec.ValidationError:
        return tuple([received_key(element) for element in _RAWS.decode(raw)])


def received_key(raw: msgspec.Raw) -> Any:
    """One value that should be a key; an array or a map as an empty one."""
    first = memoryview(raw)[0]
    if array_count(raw) is not None:
        return []
    if _FIXMAP <= first < _FIXMAP_END or first in _MAPS:
        return {}
    return _SCALAR.decode(raw)


def array_count(raw: msgspec.Raw) -> int | None:
    """How many elements a whole msgpack value says it has; None where it is no array."""
    view = memoryview(raw)
    first = view[0]
    if _FIXARRAY <= first < _FIXARRAY_END:
        return first - _FIXARRAY
    size = _COUNT_BYTES.get(first)
    return None if size is None else int.from_bytes(view[1 : 1 + size], "big")


def check_count(count: int, chunks_max: int) -> None:
    """Raise `InvalidRequest` (DescriptorTooLarge) for more chunks than a descriptor may name."""
    if count > chunks_max:
        raise InvalidRequest(
            f"chunk_keys names {count} chunks, limits.chunks_per_descriptor_max is {chunks_max}",
            code="DescriptorTooLarge",
        )
