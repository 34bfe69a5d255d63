"""Trajectories out of trace files: Mooncake's rows, with sessions, and agentic trajectories.

Mooncake: a JSON object a line. Rows of one `session_id` are an agent's turns, in the file's order,
and `delay` milliseconds lie between the end of one and the next; a row without a session is an
agent of one turn. Agentic: one JSON object a file, `requests[]` with `in` and `out` tokens, a hash
id for each block of `block_size` tokens, `think_time` seconds before, and nested `requests` of
sub-agents, which are turns in their place. In both, the leading blocks that an earlier turn of the
same file's or session's had are cached.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from objectcache_laboratory.cluster.trajectories import Trajectory
from objectcache_schemas.errors import InvalidRequest

MOONCAKE_BLOCK_TOKENS = 512

Positive = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class SessionRow(msgspec.Struct, frozen=True):
    """One row of a Mooncake trace; fields that other traces add are ignored."""

    input_length: Positive
    output_length: NotNegative
    hash_ids: tuple[int, ...]
    session_id: str | int | None = None
    delay: Seconds = 0.0  # milliseconds


class AgentRequest(msgspec.Struct, frozen=True):
    """A request of an agentic trajectory, or a sub-agent with `requests` of its own."""

    t: Seconds = 0.0
    input_tokens: Annotated[int, msgspec.Meta(ge=0)] = msgspec.field(name="in", default=0)
    output_tokens: NotNegative = msgspec.field(name="out", default=0)
    hash_ids: tuple[int, ...] = ()
    think_time: Seconds = 0.0
    requests: tuple[AgentRequest, ...] = ()


class AgentFile(msgspec.Struct, frozen=True):
    """One trajectory's file."""

    block_size: Positive
    requests: tuple[AgentRequest, ...]


_ROWS = msgspec.json.Decoder(SessionRow)
_FILE = msgspec.json.Decoder(AgentFile)


def read_trajectories(path: Path, count_max: int) -> list[Trajectory]:
    """At most so many, of a folder of agentic trajectories (`*.json`, by name), one such file, or
    a Mooncake trace (`.jsonl`).

    Raises `InvalidRequest` naming the file, and the line and field where it is wrong.
    """
    try:
        if path.is_dir():
            files = sorted(path.glob("*.json"))[:count_max]
        elif path.suffix == ".jsonl":
            return read_sessions(path)[:count_max]
        else:
            files = [path]
        found = [read_agent_file(file) for file in files]
    except OSError as error:
        raise InvalidRequest(f"trace {path}: {error.strerror}") from error
    if not found:
        raise InvalidRequest(f"trace {path}: it has no *.json")
    return found


def read_agent_file(file: Path) -> Trajectory:
    """One agentic trajectory; requests that generate nothing are one token long."""
    try:
        decoded = _FILE.decode(file.read_bytes())
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"trace {file}: {error}") from error
    requests = [each for each in _flat(decoded.requests) if each.input_tokens]
    if not requests:
        raise InvalidRequest(f"trace {file}: $.requests has no request with `in` tokens")
    return _trajectory(
        [(each.input_tokens, each.output_tokens, each.hash_ids) for each in requests],
        [each.think_time for each in requests],
        decoded.block_size,
    )


def read_sessions(file: Path) -> list[Trajectory]:
    """The trajectories of a Mooncake trace, in the order of their first rows."""
    sessions: dict[object, list[SessionRow]] = defaultdict(list)
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = _ROWS.decode(line)
            except msgspec.MsgspecError as error:
                raise InvalidRequest(f"trace {file}, line {number}: {error}") from error
            session = row.session_id
            sessions[("line", number) if session is None else session].append(row)
    if not sessions:
        raise InvalidRequest(f"trace {file}: it holds no row")
    return [
        _trajectory(
            [(row.input_length, row.output_length, row.hash_ids) for row in rows],
            [row.delay / 1e3 for row in rows],
            MOONCAKE_BLOCK_TOKENS,
        )
        for rows in sessions.values()
    ]


def _flat(requests: Sequence[AgentRequest]) -> Iterator[AgentRequest]:
    for each in requests:
        if each.requests:
            yield from _flat(each.requests)
        else:
            yield each


def _trajectory(
    turns: Sequence[tuple[int, int, Sequence[int]]], delays_s: Sequence[float], block_tokens: int
) -> Trajectory:
    seen = set[int]()
    rows = list[tuple[int, int, int]]()
    for prompt, generated, blocks in turns:
        hits = 0
        for block in blocks:
            if block not in seen:
                break
            hits += 1
        cached = min(hits * block_tokens, prompt - 1)  # one token at least is computed
        rows.append((cached, prompt - cached, max(1, generated)))
        seen.update(blocks)
    return Trajectory(np.array(rows, np.int32), np.array(delays_s))
