"""Arrivals that are made up: requests of a compute profile's rows, coming at random.

A profile is a file in the format of the paper's table A8, see `scheduling.compute_profile`. Every
row of it is as likely as any other one; its windows also serve traces.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import KIB, MIB
from objectcache_storage_server.input_files import read_text
from objectcache_storage_server.scheduling.windows.compute_profile import (
    ComputeProfile,
    parse_profile,
)
from objectcache_storage_server.simulation.arrivals import Arrival

FILE_BYTES_MAX = 1 * MIB
PAPER_MIX = """\
context,hit_rate,cached_tokens,t_total_ms,t_layer_ms,required_gbytes_per_s
4K,0.500,2048,185.31,5.79,1.45
4K,0.875,3584,63.47,1.98,7.41
16K,0.500,8192,955.89,29.87,1.12
16K,0.875,14336,281.76,8.80,6.67
32K,0.500,16384,2589.25,80.91,0.83
32K,0.875,28672,763.19,23.85,4.92
64K,0.500,32768,8672.79,271.02,0.50
64K,0.875,57344,2423.90,75.75,3.10
"""  # Llama 3.1 8B (paper, Table A8)


class Mix(NamedTuple):
    """The profile, and the (context, cached) tokens of its rows that find something."""

    profile: ComputeProfile
    rows: list[tuple[int, int]]


def read_mix(file: Path | None) -> Mix:
    """That of a file, or the paper's. Raises `InvalidRequest` naming what is wrong."""
    text = PAPER_MIX if file is None else read_text(file, FILE_BYTES_MAX)
    try:
        profile = parse_profile(text)
    except InvalidRequest as error:
        raise InvalidRequest(f"{file}: {error.message}") from None
    cells = [line.split(",") for line in text.splitlines()[1:] if line]
    rows = [(_tokens(cell[0].strip()), int(float(cell[2]))) for cell in cells]
    return Mix(profile, [row for row in rows if row[1]])


def _tokens(context: str) -> int:
    return int(context[:-1]) * KIB if context.endswith("K") else int(context)


def poisson_arrivals(mix: Mix, requests: int, rate_per_s: float, seed: int) -> list[Arrival]:
    """Requests of the mix, at that rate on average. Raises `InvalidRequest` for an empty mix."""
    if not mix.rows:
        raise InvalidRequest("no row of the mix has cached tokens")
    chooser = random.Random(seed)  # noqa: S311 - to be repeated, not secret
    windows = {row: mix.profile.window_s(*row) for row in mix.rows}
    now_s, arrivals = 0.0, list[Arrival]()
    for _ in range(requests):
        now_s += chooser.expovariate(rate_per_s)
        row = chooser.choice(mix.rows)
        arrivals.append(Arrival(now_s, row[1], windows[row]))
    return arrivals


def rate_for(mix: Mix, utilisation: float, tokens_per_s: float) -> float:
    """Requests a second of the mix that use so much of a link that carries `tokens_per_s`. Raises
    `InvalidRequest` for an empty mix.
    """
    if not mix.rows:
        raise InvalidRequest("no row of the mix has cached tokens")
    mean_tokens = sum(cached_tokens for _, cached_tokens in mix.rows) / len(mix.rows)
    return utilisation * tokens_per_s / mean_tokens
