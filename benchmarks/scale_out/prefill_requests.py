"""What the engines are asked: prompts of a trace in Mooncake's format, or made up.

A trace that is shorter than the simulation is repeated with other blocks each time, as if other
users asked the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from objectcache_schemas.errors import InvalidRequest
from objectcache_storage_server.simulation.mooncake import BLOCK_TOKENS, TraceLine, trace_lines

CONVERSATIONS = 2000  # of what is made up
TURNS_MAX = 8
ALL_S, TURN_S = 3600.0, 60.0  # all begin within that; between two turns
QUESTION_BLOCKS_MAX = 24
SYSTEM_BLOCKS = 1  # that all begin with, as in Mooncake's conversations
BLOCKS_MAX = 200


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """A prompt: its whole blocks of BLOCK_TOKENS tokens, each named by all that is before it."""

    number: int
    at_s: float
    tokens: int
    blocks: tuple[int, ...]


def trace_requests(file: Path, rate_per_s: float, until_s: float) -> list[PrefillRequest]:
    """Those of a trace, so many a second on average. Raises `InvalidRequest`."""
    return _repeated(_of_lines(trace_lines(file)), rate_per_s, until_s)


def made_up_requests(rate_per_s: float, until_s: float, seed: int) -> list[PrefillRequest]:
    """Conversations of several turns, whose prompts grow, at that rate on average."""
    chooser = random.Random(f"requests {seed}")
    return _repeated(_conversations(chooser), rate_per_s, until_s)


def _conversations(chooser: random.Random) -> list[PrefillRequest]:
    turns: list[tuple[float, tuple[int, ...]]] = []
    next_block = SYSTEM_BLOCKS
    for _ in range(CONVERSATIONS):
        at_s = chooser.uniform(0, ALL_S)
        blocks = tuple(range(SYSTEM_BLOCKS))
        for _ in range(chooser.randint(1, TURNS_MAX)):
            asked = chooser.randint(1, QUESTION_BLOCKS_MAX)
            blocks = (*blocks, *range(next_block, next_block + asked))[:BLOCKS_MAX]
            next_block += asked
            turns.append((at_s, blocks))
            at_s += chooser.expovariate(1 / TURN_S)
    turns.sort()
    tokens = BLOCK_TOKENS // 2  # of a block that is not whole
    return [
        PrefillRequest(number, at_s, len(blocks) * BLOCK_TOKENS + tokens, blocks)
        for number, (at_s, blocks) in enumerate(turns)
    ]


def _of_lines(lines: Iterator[TraceLine]) -> list[PrefillRequest]:
    requests = [
        PrefillRequest(
            number,
            line.timestamp / 1e3,
            line.input_length,
            tuple(line.hash_ids[: line.input_length // BLOCK_TOKENS]),
        )
        for number, line in enumerate(lines)
    ]
    return sorted(requests, key=lambda request: request.at_s)


def _repeated(
    once: Sequence[PrefillRequest], rate_per_s: float, until_s: float
) -> list[PrefillRequest]:
    if len(once) < 2 or once[0].at_s == once[-1].at_s:
        raise InvalidRequest("a trace must have requests at two moments at least")
    first_s = once[0].at_s
    lasts_s = once[-1].at_s - first_s
    faster = rate_per_s * lasts_s / len(once)
    blocks_each = 1 + max((block for one in once for block in one.blocks), default=0)
    requests: list[PrefillRequest] = []
    for round_number in range(1 + int(until_s * faster / lasts_s)):
        begins_s = round_number * lasts_s - first_s
        for one in once:
            at_s = (begins_s + one.at_s) / faster
            if at_s > until_s:
                return requests
            blocks = tuple(round_number * blocks_each + block for block in one.blocks)
            requests.append(replace(one, number=len(requests), at_s=at_s, blocks=blocks))
    return requests
