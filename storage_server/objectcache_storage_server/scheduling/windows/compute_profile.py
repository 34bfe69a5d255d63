"""A measured compute profile: how long a model computes on a layer, by context and hit rate.

The file has the columns of the paper's table A8, by these names and in this order:

    context,hit_rate,cached_tokens,t_total_ms,t_layer_ms,required_gbytes_per_s

A context is a number of tokens, or like `4K`, 4096. `t_layer_ms` is what counts; the last column is
for people. Between the rows the logarithm of the time is interpolated, over the logarithm of the
share of the context that is computed, and then over the logarithm of the context: prefill time
grows like a power of either. Contexts may have different hit rates each. Beyond the outermost rows
the nearest one holds. Pure.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import KIB

COLUMNS = (
    "context", "hit_rate", "cached_tokens", "t_total_ms", "t_layer_ms", "required_gbytes_per_s",
)  # fmt: skip
ROWS_MAX = 4096
HIT_RATE_ROUNDING = 0.005  # hit rates are rounded as a rule, cached tokens are not
LAYER_MS_MAX = 3_600_000.0
_CONTEXT = re.compile(r"([0-9]{1,12})(K?)")

Point = tuple[float, float]  # where, and the logarithm of seconds


class ProfileRow(NamedTuple):
    """One measurement."""

    context_tokens: int
    cached_tokens: int
    window_s: float


@dataclass(frozen=True, slots=True)
class _Context:
    """The rows of one context: points over the logarithm of the computed share, ascending."""

    log_tokens: float
    points: tuple[Point, ...]


class ComputeProfile:
    """Seconds per layer at any context and hit rate, from some that were measured."""

    def __init__(self, rows: Sequence[ProfileRow]) -> None:
        """Raises `InvalidRequest` for no rows, and for two of the same context and hit rate."""
        if not rows:
            raise InvalidRequest("there is no row below the header")
        by_context: dict[int, list[ProfileRow]] = {}
        for row in rows:
            by_context.setdefault(row.context_tokens, []).append(row)
        self._contexts = [
            _Context(math.log(tokens), _points(by_context[tokens])) for tokens in sorted(by_context)
        ]
        self.row_count = len(rows)

    def window_s(self, context_tokens: int, cached_tokens: int) -> float:
        """Seconds that a layer computes where so much of the context is cached."""
        share = max(1, context_tokens - cached_tokens) / context_tokens
        points = [
            (context.log_tokens, _interpolated(context.points, math.log(share)))
            for context in self._contexts
        ]
        return math.exp(_interpolated(points, math.log(context_tokens)))

    def __repr__(self) -> str:
        return f"<ComputeProfile {self.row_count} rows, {len(self._contexts)} contexts>"


def parse_profile(text: str) -> ComputeProfile:
    """The profile of a file. Raises `InvalidRequest` that names the line and what is wrong."""
    try:
        header, *lines = csv.reader(text.splitlines() or [""])
    except csv.Error as error:
        raise InvalidRequest(f"it is no CSV file: {error}") from error
    if tuple(header) != COLUMNS:
        raise InvalidRequest(f"line 1 must be {','.join(COLUMNS)}")
    return ComputeProfile(_rows(lines))


def _rows(lines: Iterable[list[str]]) -> list[ProfileRow]:
    rows: list[ProfileRow] = []
    for number, cells in enumerate(lines, start=2):
        if not cells:
            continue
        if len(rows) == ROWS_MAX:
            raise InvalidRequest(f"line {number}: more than {ROWS_MAX} rows")
        try:
            rows.append(_row(cells))
        except InvalidRequest as error:
            raise InvalidRequest(f"line {number}: {error.message}") from None
    return rows


def _row(cells: list[str]) -> ProfileRow:
    if len(cells) != len(COLUMNS):
        raise InvalidRequest(f"{len(cells)} cells, there must be {len(COLUMNS)}")
    texts = dict(zip(COLUMNS, cells, strict=True))
    context_tokens = _context_tokens(texts.pop("context").strip())
    numbers = {column: _number(column, text) for column, text in texts.items()}
    cached_tokens = numbers["cached_tokens"]
    if cached_tokens != int(cached_tokens) or not 0 <= cached_tokens < context_tokens:
        raise InvalidRequest(
            f"cached_tokens is {cached_tokens:g}, it must be a whole number below the context, "
            f"{context_tokens}"
        )
    if abs(cached_tokens / context_tokens - numbers["hit_rate"]) > HIT_RATE_ROUNDING:
        raise InvalidRequest(
            f"hit_rate is {numbers['hit_rate']:g}, cached_tokens over context is "
            f"{cached_tokens / context_tokens:.3f}"
        )
    if not 0 < numbers["t_layer_ms"] <= LAYER_MS_MAX:
        raise InvalidRequest(f"t_layer_ms is {numbers['t_layer_ms']:g}, it must be above 0")
    return ProfileRow(context_tokens, int(cached_tokens), numbers["t_layer_ms"] / 1e3)


def _context_tokens(text: str) -> int:
    match = _CONTEXT.fullmatch(text)
    tokens = int(match[1]) * (KIB if match[2] else 1) if match else 0
    if not tokens:
        raise InvalidRequest(f"context is {text!r}, it must be like 4K, or a number of tokens")
    return tokens


def _number(column: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise InvalidRequest(f"{column} is {text!r}, it must be a number, 0 or more")
    return number


def _points(rows: Iterable[ProfileRow]) -> tuple[Point, ...]:
    points = sorted((math.log(1 - cached / tokens), math.log(s)) for tokens, cached, s in rows)
    for before, after in pairwise(points):
        if before[0] == after[0]:
            raise InvalidRequest(
                f"two rows have the same context and hit rate, {1 - math.exp(after[0]):.3f}"
            )
    return tuple(points)


def _interpolated(points: Sequence[Point], x: float) -> float:
    """Linearly between the points, which ascend; the outermost one's beyond them."""
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if x <= x1:
            return y1 if x == x1 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return points[-1][1]
