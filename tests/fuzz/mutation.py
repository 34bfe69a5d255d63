"""Inputs from seeds: what a client sends, changed in a few places. A seed always gives the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

INPUT_BYTES_MAX = 1 << 16

# Bytes that mean something to one of the parsers.
_MARKS: tuple[bytes, ...] = (
    *(b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b";", b",", b"=", b"&", b"?", b"#", b"%"),
    *(b"/", b"//", b"/../", b"/./", b"+", b"%00", b"%2F", b"%ff", b"%", b"%C3%28", b"*", b'"'),
    *(b"<", b">", b"</", b"<!DOCTYPE x [", b"<!ENTITY a 'b'>", b"&lt;", b"&a;", b"&#0;", b"]]>"),
    *(b"\xff", b"\xfe", b"\xc3", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", "\u00e9\u65e5".encode()),
    *(b"0", b"-1", b"00", b"1e9", b"NaN", b"inf", b"0x10", b"4294967296", b"18446744073709551616"),
    *(b"9" * 400, b"A" * 2000, b"bytes=0-", b"chunked", b"100-continue", b"AWS4-HMAC-SHA256"),
    *(b"\x80", b"\x90", b"\xc0", b"\xc1", b"\xdb\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff"),
    *(b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xcf" + b"\xff" * 8, b"\x91" * 300),
    *(b"\xd3\x80" + bytes(7), b"\xcb\x7f\xf0" + bytes(6), b"\xcb\x7f\xf8" + bytes(6)),
)

Mutation = Callable[[random.Random, bytearray, Sequence[bytes]], None]


def random_for(seed: int, part: str, index: int) -> random.Random:
    """The source of everything about input number `index` of a part."""
    return random.Random(f"{seed}/{part}/{index}")


def mutated(rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    """One of the seeds with 0 to 6 changes, seldom bytes that come from nowhere."""
    if rng.random() < 0.02:
        return rng.randbytes(rng.randrange(200))
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3, 4, 6))):
        rng.choice(_MUTATIONS)(rng, data, seeds)
    return bytes(data[:INPUT_BYTES_MAX])


def _span(rng: random.Random, data: bytearray) -> slice:
    start = rng.randrange(len(data) + 1)
    return slice(start, min(len(data), start + rng.choice((0, 1, 1, 2, 4, 8, 16, 64))))


def _flip(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _overwrite(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    if data:
        data[rng.randrange(len(data))] = rng.randrange(256)


def _insert(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    position = rng.randrange(len(data) + 1)
    data[position:position] = rng.choice(_MARKS)


def _replace(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    data[_span(rng, data)] = rng.choice(_MARKS)


def _remove(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    del data[_span(rng, data)]


def _repeat(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    span = _span(rng, data)
    data[span] = bytes(data[span]) * rng.choice((2, 3, 16, 200))


def _cut(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    del data[rng.randrange(len(data) + 1) :]


def _splice(rng: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    other = rng.choice(seeds)
    if other:
        start = rng.randrange(len(other))
        data[_span(rng, data)] = other[start : start + rng.choice((4, 16, 64, 256))]


def _number(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    digits = [position for position, byte in enumerate(data) if 48 <= byte <= 57]
    if digits:
        position = rng.choice(digits)
        number = rng.choice((0, 1, 2**31, 2**32, 2**63, 2**64, 10**30, rng.randrange(10_000)))
        data[position : position + 1] = str(number).encode()


_MUTATIONS: tuple[Mutation, ...] = (
    *(_flip, _overwrite, _insert, _insert, _replace, _replace),
    *(_remove, _repeat, _cut, _splice, _number),
)
