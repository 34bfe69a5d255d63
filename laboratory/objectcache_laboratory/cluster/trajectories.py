"""Agents' trajectories: turns that append tokens, generate some, and read all before them.

The paper published Table 2 of its traces, not the traces. Its columns do not multiply (turns x
(append + gen) is more than total), so append and gen are means of each trajectory's mean. With a
log-normal number of turns of shape sigma that does not depend on the total, a mean of means is
exp(sigma^2) times larger, which gives sigma; the mean context gives f, the share of the total that
the first turn appends; gen gives h, the share of the growth after it that is generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from objectcache_schemas.errors import InvalidRequest

CACHED, APPENDED, GENERATED = range(3)
TRACE_TRAJECTORIES = 500  # of each of the paper's traces


@dataclass(frozen=True, slots=True)
class Trajectory:
    """`turns` is int32[turns, 3]: tokens cached, appended and generated of each turn.

    `delays_s` is float64[turns], how long the agent waits before each; None is not at all.
    """

    turns: NDArray[np.int32]
    delays_s: NDArray[np.float64] | None = None

    @property
    def total_tokens(self) -> int:
        """Its last turn's context with what that appends and generates."""
        return int(self.turns[-1].sum())

    def scaled(self, append: float, generate: float, tokens_max: int) -> Trajectory:
        """Appends and generations times a factor, cut off where the context would be over
        `tokens_max` (the paper's Figure 9); at least one turn is left, cut to it.
        """
        turns = self.turns.copy()
        turns[:, APPENDED] = np.maximum(1, np.rint(turns[:, APPENDED] * append))
        turns[:, GENERATED] = np.maximum(1, np.rint(turns[:, GENERATED] * generate))
        grown = turns[:, APPENDED] + turns[:, GENERATED]
        turns[:, CACHED] = turns[0, CACHED] + np.concatenate(([0], np.cumsum(grown)[:-1]))
        kept = max(1, int(np.searchsorted(turns.sum(axis=1), tokens_max, side="right")))
        turns[0, APPENDED] = min(turns[0, APPENDED], tokens_max)
        return Trajectory(turns[:kept], None if self.delays_s is None else self.delays_s[:kept])


@dataclass(frozen=True, slots=True)
class TraceShape:
    """A row of Table 2, with the generator's three parameters."""

    name: str
    tokens_max: int
    turns: float
    append: float
    generate: float
    total: float
    context: float
    sigma: float
    first_share: float  # f
    generated_share: float  # h


TRACES = {
    shape.name: shape
    for shape in (
        TraceShape("32K", 32_768, 60, 608, 148, 28_639, 17_183, 0.678, 0.250, 0.261),
        TraceShape("48K", 49_152, 106, 474, 172, 42_607, 25_120, 0.689, 0.207, 0.336),
        TraceShape("64K", 65_536, 157, 429, 176, 55_958, 32_721, 0.727, 0.190, 0.359),
    )
}


class Table2Row(NamedTuple):
    """Table 2's columns, measured: turns and total of a mean trajectory; append, gen and context
    are means of the trajectories' own means.
    """

    turns: float
    append: float
    generate: float
    total: float
    context: float


def generate(shape: TraceShape, count: int, seed: int) -> list[Trajectory]:
    """So many trajectories, in an order that the seed gives.

    The number of turns is taken from each of `count` equal parts of its distribution, so that few
    trajectories, too, have its mean. Totals are uniform around the mean, up to the trace's limit.
    """
    if count < 1:
        raise InvalidRequest(f"{count} trajectories; at least 1")
    rng = np.random.default_rng(seed)
    normal = NormalDist(float(np.log(shape.turns)) - shape.sigma**2 / 2, shape.sigma)
    parts = (np.arange(count) + rng.uniform(0.05, 0.95, count)) / count
    counts = [max(1, round(float(np.exp(normal.inv_cdf(part))))) for part in parts]
    spread = shape.tokens_max - shape.total
    totals = shape.total + spread * (2 * (rng.permutation(count) + 0.5) / count - 1)
    order = rng.permutation(count)
    return [_trajectory(shape, counts[each], round(float(totals[each])), rng) for each in order]


def replayed(shape: TraceShape, agents: int, seed: int) -> list[Trajectory]:
    """One trajectory an agent. As in the paper (its appendix A.3), more agents than a trace has
    trajectories replay the same again, so that no number of agents makes the longest one longer:
    each as often as the others, and the rest drawn without replacement.
    """
    found = generate(shape, min(agents, TRACE_TRAJECTORIES), seed)
    rng = np.random.default_rng([seed, agents])
    order = [
        number
        for begin in range(0, agents, len(found))
        for number in rng.permutation(len(found))[: agents - begin].tolist()
    ]
    return [found[number] for number in order]


def _trajectory(shape: TraceShape, turns: int, total: int, rng: np.random.Generator) -> Trajectory:
    growth = total * (1 - shape.first_share)
    generated = _spread(growth * shape.generated_share, turns, rng)
    appended = np.empty(turns, np.int32)
    appended[0] = round(total * shape.first_share)
    appended[1:] = _spread(growth * (1 - shape.generated_share), turns - 1, rng)
    cached = np.concatenate(([0], np.cumsum(appended + generated)[:-1]))
    return Trajectory(np.stack([cached, appended, generated], axis=1).astype(np.int32))


def _spread(tokens: float, parts: int, rng: np.random.Generator) -> NDArray[np.int32]:
    """Tokens over parts, of exponential sizes, at least one each."""
    weights = rng.exponential(size=parts)
    ends = np.rint(np.cumsum(weights) * (tokens / max(float(weights.sum()), 1e-12)))
    return np.maximum(1, np.diff(ends, prepend=0)).astype(np.int32)


def table_2(trajectories: Sequence[Trajectory]) -> Table2Row:
    """Of these trajectories."""
    means = np.array([each.turns.mean(axis=0) for each in trajectories])
    cached, appended, generated = means.mean(axis=0)
    return Table2Row(
        turns=float(np.mean([len(each.turns) for each in trajectories])),
        append=float(appended),
        generate=float(generated),
        total=float(np.mean([each.total_tokens for each in trajectories])),
        context=float(cached),
    )
