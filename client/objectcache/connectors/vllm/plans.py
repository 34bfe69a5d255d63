"""What the scheduler's side tells the workers for one step, and what they answer."""

from __future__ import annotations

from dataclasses import dataclass, field

from objectcache.connectors.timing.compute_windows import NOTHING_COMPUTED, BatchShape


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Blocks of one request that are to be filled from the store, in prefix order.

    `weights` stands in their names for the weights that they are of, as the scheduler knows them.
    `relay` is the node over whose relay the request's router wants them read; empty: it says none.
    """

    request_id: str
    block_ids: tuple[int, ...]
    hashes: tuple[bytes, ...]
    context_tokens: int
    weights: str
    relay: str = ""


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Blocks of one request that are full after this step, from its block `first` on.

    `parent` is the hash of the block before them; `weights` is as in a `LoadPlan`.
    """

    request_id: str
    first: int
    block_ids: tuple[int, ...]
    hashes: tuple[bytes, ...]
    parent: bytes | None
    weights: str


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: what to load before it, what to take from it, and what became of earlier steps.

    `parked` are loads that begin with the step and end before a later one; those of the requests
    `given_up` are wanted no more. A step's blocks are stored only once every worker's loads for it,
    and for the steps under way with it, are known to be whole: `good` and `bad` name the steps for
    which that is decided.
    `batch` is all that the step computes.
    """

    step: int
    loads: tuple[LoadPlan, ...] = ()
    saves: tuple[SavePlan, ...] = ()
    good: tuple[int, ...] = ()
    bad: tuple[int, ...] = ()
    batch: BatchShape = NOTHING_COMPUTED
    parked: tuple[LoadPlan, ...] = ()
    given_up: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerMeasures:
    """What workers have measured since their last report: what a layer took in steps of a shape;
    bytes of loads, and seconds from when they were asked for until they were in host memory; how
    long their steps waited for layers.
    """

    layers_s: tuple[tuple[BatchShape, float], ...] = ()
    loads: tuple[tuple[int, float], ...] = ()
    waited_s: float = 0.0

    def with_rank(self, other: WorkerMeasures) -> WorkerMeasures:
        """Of two ranks, which compute alike, and load each its own part."""
        return WorkerMeasures(
            self.layers_s or other.layers_s,
            self.loads + other.loads,
            max(self.waited_s, other.waited_s),
        )


NOTHING_MEASURED = WorkerMeasures()


@dataclass(slots=True)
class StepVerdicts:
    """Which steps computed on whole KV. What a step computed after a failed load is not stored,
    on no rank, and neither is what was under way when the failure was heard of.
    """

    issued: int = 0
    _open: set[int] = field(default_factory=set[int])
    _good: list[int] = field(default_factory=list[int])
    _bad: list[int] = field(default_factory=list[int])

    def issue(self, saves: bool) -> int:
        """The next step's number; only of steps with saves a verdict is needed."""
        self.issued += 1
        if saves:
            self._open.add(self.issued)
        return self.issued

    def reported(self, steps: set[int], failed: bool) -> None:
        """The workers are through with these steps; with a failure all that were issued are bad."""
        if failed:
            self._bad += sorted(self._open)
            self._open.clear()
            return
        self._good += sorted(steps & self._open)
        self._open -= steps

    def take(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Good and bad steps that were not taken before."""
        good, bad = tuple(self._good), tuple(self._bad)
        self._good.clear()
        self._bad.clear()
        return good, bad
