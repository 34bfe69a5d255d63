"""What the demo measured, and what of it is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

from objectcache_laboratory.reference_engine.config import ModelConfig
from objectcache_laboratory.reference_engine.engine import RECOMPUTATION_TOLERANCE

SAME_HOST = "same host"
PLAIN, ENCODED = "plain", "encoded"  # over the slow link


@dataclass(frozen=True, slots=True)
class LayerEvents:
    """One layer of one reuse, in seconds from the moment the prompt was there."""

    layer: int
    arrival_s: float  # its KV was usable
    wait_start_s: float  # the engine asked for it
    compute_start_s: float
    compute_end_s: float


@dataclass(frozen=True, slots=True)
class ReuseMeasurement:
    """One turn answered with a fetched prefix."""

    path: str  # between server and engine: `SAME_HOST`, or the name of a link
    delivery: str  # chunkwise or layerwise
    transport: str  # shared_memory or body
    ttft_s: float  # prompt to first token: match, fetch, suffix
    fetch_start_s: float  # the match was answered
    layers: tuple[LayerEvents, ...]
    wire_bytes: int  # of the payload as it was sent
    bytes_identical: bool  # fetched KV to what was put
    logits_identical: bool  # to those of the same KV kept in local memory


@dataclass(frozen=True, slots=True)
class TurnMeasurement:
    """One turn of the conversation."""

    turn: int
    prompt_tokens: int
    hit_tokens: int
    fetched_bytes: int
    stored_chunks: int
    recompute_ttft_s: float
    reuses: tuple[ReuseMeasurement, ...] = ()  # empty: nothing of the prompt was stored
    slow_reuses: tuple[ReuseMeasurement, ...] = ()  # over the slow link, plain and encoded
    logits_difference: float = 0.0  # of reuse to recomputation, relative
    answer: tuple[int, ...] = ()
    recomputed_answer: tuple[int, ...] = ()

    def reuse(self, path: str, delivery: str) -> ReuseMeasurement | None:
        """The measurement over that path with that delivery, if there is one."""
        wanted = (path, delivery)
        return next((r for r in self.reuses if (r.path, r.delivery) == wanted), None)


@dataclass(frozen=True, slots=True)
class DemoResult:
    """A whole run."""

    document: str
    document_tokens: int
    model: ModelConfig
    chunk_tokens: int
    paths: tuple[str, ...]
    turns: tuple[TurnMeasurement, ...]

    def failures(self) -> list[str]:
        """Every reason why the answers do not agree; empty is success."""
        found = [failure for turn in self.turns for failure in _turn_failures(turn)]
        found += [
            f"turn {turn.turn}: nothing of the prefix was found in the store"
            for turn in self.turns[1:]
            if not turn.hit_tokens
        ]
        return found

    def to_json(self) -> str:
        """All of it as a JSON document."""
        failures = self.failures()
        document = {"agree": not failures, "failures": failures, **asdict(self)}
        return json.dumps(document, indent=2) + "\n"


def best_reuse(turns: Iterable[TurnMeasurement]) -> TurnMeasurement | None:
    """The turn worth drawing: the one that fetched most."""
    reused = [turn for turn in turns if turn.reuses]
    return max(reused, key=lambda turn: turn.fetched_bytes, default=None)


def _turn_failures(turn: TurnMeasurement) -> Iterator[str]:
    for reuse in (*turn.reuses, *turn.slow_reuses):
        fetching = f"{reuse.delivery} fetching over {reuse.path}"
        if not reuse.bytes_identical:
            yield f"turn {turn.turn}: {fetching} gave other bytes than were put"
        if not reuse.logits_identical:
            yield (
                f"turn {turn.turn}: logits after {fetching} are not bit-identical "
                f"to those of the same KV in local memory"
            )
    if turn.logits_difference > RECOMPUTATION_TOLERANCE:
        yield (
            f"turn {turn.turn}: logits of reuse and recomputation differ by "
            f"{turn.logits_difference:.1e}, {RECOMPUTATION_TOLERANCE:.0e} is allowed"
        )
    if turn.answer != turn.recomputed_answer:
        yield f"turn {turn.turn}: the answers of reuse and recomputation differ"
