"""How long an engine computes on a layer, learned from its own steps. Pure.

A step computes some tokens, each of which attends to those before it. With a, b and c that are none
of them negative a layer takes a + b * tokens + c * pairs: what it costs whatever is computed, its
matrices, and its attention. They are fitted anew for each question, to the steps that were most
like it and latest, so that neither an engine that gets slower nor one whose small steps cost more
than the large ones promise is answered by an average of everything.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

import numpy as np
import numpy.typing as npt

STEPS_KEPT = 8  # of each octave of tokens: many small steps do not crowd a large one out
STEPS_MIN = 2  # before that nothing is claimed: the first one may have compiled something
LIKENESS = 2.0  # octaves of tokens and pairs at which a step counts for 0.6 of one that is the same
FORGETTING = 0.8  # of a step's weight for each later one of its octave
OUTLIER = 0.05  # of the time; a step that is further away counts in proportion less
FITTINGS = 4  # the first one, and those that leave outliers out
TOKENS_REACH = 4.0  # times more or fewer than a step that was seen; beyond nothing is claimed
PAIRS_REACH = 16.0  # times more: attention is a small part of a layer until contexts are long
LAYER_S_MAX = 3600.0
DOUBT = 0.001  # of attention: what tokens explain as well is not laid to pairs
ROUNDING = 1e-9

_CHOICES = [chosen for count in (3, 2, 1) for chosen in combinations(range(3), count)]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class BatchShape:
    """What a step computes: tokens of all its requests together, and how many pairs of a token and
    one that it attends to.
    """

    tokens: int
    pairs: float

    @classmethod
    def of(cls, requests: Iterable[tuple[int, int]]) -> BatchShape:
        """Of requests that compute so many tokens each, behind so many that they have."""
        tokens, pairs = 0, 0.0
        for computed, before in requests:
            tokens += computed
            pairs += computed * (before + computed / 2)
        return cls(tokens, pairs)


NOTHING_COMPUTED = BatchShape(0, 0.0)


@dataclass(frozen=True, slots=True)
class _Step:
    tokens: int
    pairs: float
    layer_s: float


class WindowLearner:
    """Windows of batch shapes, from the steps that an engine has computed. One thread at a time."""

    def __init__(self) -> None:
        self._octaves: dict[int, deque[_Step]] = {}
        self._count = 0

    def learn(self, shape: BatchShape, layers_s: Sequence[float]) -> None:
        """A step has ended whose layers took so long each. What is no step teaches nothing."""
        layer_s = median(layers_s) if layers_s else 0.0
        if not (shape.tokens >= 1 and 0 < layer_s <= LAYER_S_MAX):
            return
        octave = shape.tokens.bit_length()
        steps = self._octaves.setdefault(octave, deque(maxlen=STEPS_KEPT))
        steps.append(_Step(shape.tokens, max(1.0, shape.pairs), layer_s))
        self._count += 1

    def window_s(self, shape: BatchShape) -> float | None:
        """The time that a layer of such a step takes; None where too little is known."""
        if self._count < STEPS_MIN or shape.tokens < 1:
            return None
        weighted = [
            (step, FORGETTING**age)
            for steps in self._octaves.values()
            for age, step in enumerate(reversed(steps))
        ]
        return _fitted(weighted, shape) if _is_near([step for step, _ in weighted], shape) else None

    def __repr__(self) -> str:
        kept = sum(len(steps) for steps in self._octaves.values())
        return f"<WindowLearner {self._count} steps, {kept} kept>"


def _is_near(steps: Sequence[_Step], shape: BatchShape) -> bool:
    """Whether the fit says something of the shape: some step had about as many tokens, and one had
    no far smaller attention.
    """
    has_tokens = any(
        step.tokens / TOKENS_REACH <= shape.tokens <= step.tokens * TOKENS_REACH for step in steps
    )
    return has_tokens and shape.pairs <= PAIRS_REACH * max(step.pairs for step in steps)


def _fitted(weighted: Sequence[tuple[_Step, float]], shape: BatchShape) -> float:
    """a + b * tokens + c * pairs of the shape, by the steps' errors in proportion to their time."""
    table = np.array([(s.tokens, s.pairs, s.layer_s) for s, _ in weighted], np.float64)
    tokens, pairs, layer_s = table.T
    asked_pairs = max(1.0, shape.pairs)
    octaves = np.hypot(np.log2(tokens / shape.tokens), np.log2(pairs / asked_pairs))
    weights = np.array([weight for _, weight in weighted]) * np.exp(
        -((octaves / LIKENESS) ** 2) / 2
    )
    # In units of the shape the three terms are of one size, and their sum is the answer.
    terms = np.stack([np.ones(len(table)), tokens / shape.tokens, pairs / asked_pairs], 1)
    terms /= layer_s[:, None]
    fit = _least_squares(terms, weights)
    for _ in range(FITTINGS - 1):
        errors = np.abs(terms @ fit - 1)
        usual = max(OUTLIER, float(np.average(errors, weights=weights)))
        fit = _least_squares(terms, weights / np.maximum(1, errors / usual))
    return float(fit.sum())


def _least_squares(terms: Floats, weights: Floats) -> Floats:
    """Factors of which none is negative, with which each row of terms comes as near to 1 as can be.

    Of three terms the seven choices of which are above 0 are tried. Of prompts that are computed
    from their beginning tokens and pairs grow together; noise could then be taken for attention,
    and a long prefix would multiply it.
    """
    weighted = terms * weights[:, None]
    products, sums = weighted.T @ terms, weighted.sum(axis=0)
    products += np.eye(len(sums)) * (ROUNDING * np.trace(products))  # for terms that are alike
    products[2, 2] += DOUBT * products[0, 0]
    best, best_gain = np.zeros(len(sums)), -math.inf
    for chosen in _CHOICES:
        factors = np.linalg.solve(products[np.ix_(chosen, chosen)], sums[list(chosen)])
        gain = float(factors @ sums[list(chosen)])
        if gain > best_gain * (1 + ROUNDING) and (factors >= 0).all():
            best, best_gain = np.zeros(len(sums)), gain
            best[list(chosen)] = factors
    return best
