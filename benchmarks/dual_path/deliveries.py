"""What processes on nodes do with prompts: put them, fetch them over routes, and prefill.

Every byte that is fetched is compared, outside of the timed part, and so are the logits.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.dual_path.node_side import NodeSide
from objectcache.deliveries.delivery import Delivery
from objectcache_laboratory.reference_engine.engine import PrefillResult
from objectcache_laboratory.reference_engine.kv_chunks import KvSource

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class DoneDelivery:
    """One delivery that was prefilled from; seconds since it was asked for."""

    number: int
    route: str
    reason: str
    first_s: float  # until the first layer
    last_s: float
    computed_s: float  # until the first token


class NotedLayers:
    """A source of KV that keeps what it gave, and when."""

    def __init__(self, source: KvSource, begun_s: float) -> None:
        self._source = source
        self._begun_s = begun_s
        self.layers: list[Bytes] = []
        self.at_s: list[float] = []

    def wait_layer(self, layer: int) -> Bytes:
        """Wait for it where it comes from."""
        payload = self._source.wait_layer(layer)
        self.at_s.append(time.monotonic() - self._begun_s)
        self.layers.append(payload)
        return payload


def put_prompts(side: NodeSide, numbers: Sequence[int]) -> None:
    """Store the prefixes."""
    for number in numbers:
        side.bucket.put(side.keys(number), side.prompt(number).chunks, transport="body")


def join(side: NodeSide, routes: Sequence[str]) -> None:
    """Fetch the prefix that is there for it, so that connections, sessions and targets are, too."""
    number = side.reached.volume.joining_prompt
    for route in routes:
        for _ in range(2):
            check(side, number, fetched(side, number, route))


def prefill_all(
    side: NodeSide, numbers: Sequence[int], route: str, at_once: int
) -> tuple[float, list[DoneDelivery]]:
    """Prefill from all prefixes, so many at once; the seconds that all took together, too."""
    with ThreadPoolExecutor(at_once) as threads:
        begun_s = time.monotonic()
        tasks = [threads.submit(fetched, side, number, route) for number in numbers]
        results = [task.result() for task in tasks]
        taken_s = time.monotonic() - begun_s
    return taken_s, [
        check(side, number, done) for number, done in zip(numbers, results, strict=True)
    ]


def prefill_until(
    side: NodeSide, numbers: Sequence[int], route: str, at_once: int, stop: Path
) -> int:
    """Prefill from the prefixes over one route, until a file is there; how often."""
    following = itertools.cycle(numbers)

    def some() -> int:
        done = 0
        while not stop.exists():
            number = next(following)
            check(side, number, fetched(side, number, route))
            done += 1
        return done

    with ThreadPoolExecutor(at_once) as threads:
        return sum(one.result() for one in [threads.submit(some) for _ in range(at_once)])


@dataclass(frozen=True, slots=True, eq=False)
class Fetched:
    """A prefill whose bytes are not compared yet."""

    route: str
    reason: str
    noted: NotedLayers
    result: PrefillResult
    computed_s: float


def fetched(side: NodeSide, number: int, route: str) -> Fetched:
    """Prefill from one prefix over one route."""
    keys = side.keys(number)
    begun_s = time.monotonic()
    with side.bucket.fetch(keys, delivery="layerwise", route=route) as delivery:
        return prefilled(side, number, delivery, delivery, begun_s)


def prefilled(
    side: NodeSide, number: int, delivery: Delivery, source: KvSource, begun_s: float
) -> Fetched:
    """Prefill from the layers of a delivery, as `source` gives them."""
    noted = NotedLayers(source, begun_s)
    result = side.engine().prefill_suffix(
        noted, side.prompt(number).suffix, prefix_tokens=side.reached.shape.prefix_tokens
    )
    computed_s = time.monotonic() - begun_s
    return Fetched(delivery.route, delivery.route_reason, noted, result, computed_s)


def prefill_one(side: NodeSide, number: int, route: str) -> DoneDelivery:
    """Prefill from one prefix."""
    return check(side, number, fetched(side, number, route))


def check(side: NodeSide, number: int, done: Fetched) -> DoneDelivery:
    """Compare every byte, and the logits. Raises `WrongBytes`."""
    prompt = side.prompt(number)
    for layer, payload in enumerate(done.noted.layers):
        if not np.array_equal(payload, prompt.chunks[:, layer]):
            raise WrongBytes(f"layer {layer} of prompt {number} over {done.route}")
    if len(done.noted.layers) != side.reached.shape.num_layers:
        raise WrongBytes(f"prompt {number} over {done.route} has {len(done.noted.layers)} layers")
    if not np.array_equal(done.result.logits, prompt.logits):
        raise WrongBytes(f"the logits of prompt {number} over {done.route}")
    at_s = done.noted.at_s
    return DoneDelivery(number, done.route, done.reason, at_s[0], at_s[-1], done.computed_s)


class WrongBytes(Exception):
    """Something else was delivered than was put."""
