"""Arrivals from a trace in Mooncake's format: JSON lines with timestamp (milliseconds),
input_length, output_length, and hash_ids, one for each block of 512 tokens.

A request finds the blocks at its beginning that requests before it have brought.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from objectcache_schemas.errors import InvalidRequest
from objectcache_storage_server.scheduling.windows.compute_profile import ComputeProfile
from objectcache_storage_server.simulation.arrivals import Arrival

BLOCK_TOKENS = 512
REQUESTS_MAX = 200_000
LINE_BYTES_MAX = 1 << 20
TOKENS_MAX = 1 << 24


class TraceLine(msgspec.Struct, frozen=True):
    """One request."""

    timestamp: float
    input_length: int
    hash_ids: list[int]


def trace_arrivals(file: Path, profile: ComputeProfile, requests_max: int) -> list[Arrival]:
    """The first `requests_max` requests that find something, counted from the trace's beginning.

    Raises `InvalidRequest` with the line that is wrong.
    """
    arrivals: list[Arrival] = []
    stored: set[int] = set()
    for line in trace_lines(file):
        cached_tokens = _matched(line.hash_ids, stored) * BLOCK_TOKENS
        stored.update(line.hash_ids)
        # the last token is computed whatever is stored
        cached_tokens = min(cached_tokens, (line.input_length - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
        if cached_tokens > 0:
            window_s = profile.window_s(line.input_length, cached_tokens)
            arrivals.append(Arrival(line.timestamp / 1e3, cached_tokens, window_s))
        if len(arrivals) == requests_max:
            break
    if not arrivals:
        raise InvalidRequest(f"{file}: no request finds a block that one before it has brought")
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def _matched(hash_ids: list[int], stored: set[int]) -> int:
    matched = 0
    while matched < len(hash_ids) and hash_ids[matched] in stored:
        matched += 1
    return matched


def trace_lines(file: Path) -> Iterator[TraceLine]:
    """A trace's requests in its order. Raises `InvalidRequest` with the line that is wrong."""
    decoder = msgspec.json.Decoder(TraceLine)
    try:
        with file.open("rb") as stream:
            for number in range(1, REQUESTS_MAX + 1):
                text = stream.readline(LINE_BYTES_MAX)
                if not text:
                    return
                if text.strip():
                    yield _decoded(decoder, text, f"{file}, line {number}")
    except OSError as error:
        raise InvalidRequest(f"cannot read {file}: {error.strerror}") from error


def _decoded(decoder: msgspec.json.Decoder[TraceLine], text: bytes, place: str) -> TraceLine:
    try:
        line = decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{place}: {error}") from error
    if not 0 <= line.timestamp <= 1e12:
        raise InvalidRequest(f"{place}: timestamp must be milliseconds, got {line.timestamp:g}")
    if not 0 < line.input_length <= TOKENS_MAX:
        raise InvalidRequest(
            f"{place}: input_length must be 1 to {TOKENS_MAX}, got {line.input_length}"
        )
    return line
