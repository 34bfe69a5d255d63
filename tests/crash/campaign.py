"""A store's life: worked on, killed or cut from power, and looked at, again and again."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from objectcache_schemas.records import BucketInfo
from tests.crash.fork_server import ForkServer
from tests.crash.journal import Life, Ran, read_journal
from tests.crash.stores import STORE_KINDS
from tests.crash.verdict import Name, Promises, problems
from tests.crash.worker import Found, Look, Sabotage, Work
from tests.crash.workload import ASYNC, Value, buckets

LIVES = 25  # kills of one store, about, before another one begins
KILLS_IN_A_ROW = 3  # at most, without a look in between
SHORTEST_S, LONGEST_S = 0.003, 0.25  # until a kill, most often short
MOST_TIMES = 10  # as many kills as asked for, where they show too little
PART_ONCE_OPEN = 0.8  # of kills, counted from the moment when the store is open


class StoreFailed(AssertionError):
    """What was found in a store cannot be."""


@dataclass(slots=True)
class Tally:
    """What a campaign has seen, so that a test can tell that it saw enough."""

    kills: int = 0
    looks: int = 0
    stores: int = 0
    acknowledged: int = 0
    unfinished: int = 0
    happened: Counter[str] = field(default_factory=Counter[str])  # acknowledged, by kind
    compacted: int = 0
    reencoded: int = 0
    evicted: int = 0
    paths: set[str] = field(default_factory=set)

    def add(self, life: Life) -> None:
        """Count what one process did."""
        ran, _, upkept = life
        self.kills += 1
        self.compacted += upkept.compacted_objects
        self.reencoded += upkept.reencoded_objects
        self.evicted += upkept.evicted_objects
        self.paths.update(upkept.paths)
        self.happened.update(type(each.operation).__name__ for each in ran if each.is_acknowledged)
        self.acknowledged += sum(each.is_acknowledged for each in ran)
        self.unfinished += sum(not each.is_acknowledged for each in ran)


class Campaign:
    """Stores of one kind below `folder`, one at a time.

    `cut` is called with a seed when nothing runs, and loses what was not flushed.
    """

    def __init__(
        self,
        kind: str,
        folder: Path,
        journals: Path,
        seed: int,
        server: ForkServer,
        *,
        has_async: bool = False,
        sabotage: Sabotage = Sabotage.NONE,
        cut: Callable[[int], object] | None = None,
    ) -> None:
        self.tally = Tally()
        self._kind = kind
        self._folder = folder
        self._journals = journals
        self._seed = seed
        self._rng = random.Random(f"{seed} {kind}")
        self._server = server
        self._has_async = has_async
        self._sabotage = sabotage
        self._cut = cut
        self._store = folder / "none"
        self._buckets: list[BucketInfo] = []
        self._state: dict[Name, Value] = {}
        self._cuts: list[object] = []
        self._patience = 1.0  # by which a process lives longer

    def run(
        self, kill_count: int, is_enough: Callable[[Tally], bool] = lambda tally: True
    ) -> Tally:
        """Kill so many times, and go on within reason until what was seen is enough: how much a
        process gets done before its death is up to the machine, and each one beyond is let live the
        longer. Raises `StoreFailed` with the seed and what repeats it.
        """
        while self.tally.kills < kill_count or (
            not is_enough(self.tally) and self.tally.kills < MOST_TIMES * kill_count
        ):
            self._patience = max(1.0, 2 * self.tally.kills / kill_count)
            if not self._buckets or self._rng.random() < 1 / LIVES:
                self._begin_store()
            self._kill_and_look()
        return self.tally

    def _begin_store(self) -> None:
        shutil.rmtree(self._store, ignore_errors=True)
        self.tally.stores += 1
        self._store = self._folder / f"store {self.tally.stores}"
        self._buckets = buckets(self._has_async)
        self._state = {}
        engine = STORE_KINDS[self._kind].open(self._store)
        for bucket in self._buckets:
            engine.create_bucket(msgspec.structs.replace(bucket, layout=None))
            if bucket.layout is not None:
                engine.set_layout(bucket.name, bucket.layout)
        engine.close()

    def _kill_and_look(self) -> None:
        ran: list[Ran] = []
        tick = 0
        self._cuts = []
        for _ in range(self._rng.randint(1, KILLS_IN_A_ROW)):
            life = self._worked(tick)
            if life.troubles:
                self._fail(life.troubles)
            ran += life.ran
            tick = max([tick, *(each.ended for each in life.ran)]) + 1
        found = self._look()
        wrong = found.troubles + problems(self._state, ran, _state(found), self._promises)
        if wrong:
            self._fail(wrong)
        self._state = _state(found)

    @property
    def _promises(self) -> Promises:
        lossy = {ASYNC} if self._cut and self._has_async else set[str]()
        evicts = STORE_KINDS[self._kind].promises.evicts
        return Promises(evicts=evicts, lossy_buckets=frozenset(lossy))

    def _worked(self, tick: int) -> Life:
        """One process from its start to its death."""
        journal = self._journals / "journal"
        journal.unlink(missing_ok=True)
        work = Work(
            self._kind,
            str(self._store),
            str(journal),
            self._rng.getrandbits(32),
            self._has_async,
            self._sabotage,
        )
        delay_s = self._patience * SHORTEST_S * (LONGEST_S / SHORTEST_S) ** self._rng.random()
        once_open = self._rng.random() < PART_ONCE_OPEN
        status = self._server.run(work, delay_s, once_open=once_open)
        life = read_journal(journal, tick)
        if status >= 0 and not life.troubles:
            life.troubles.append(f"the process ended by itself with exit status {status}")
        if self._cut:
            self._cuts.append(self._cut(self._rng.getrandbits(32)))
        self.tally.add(life)
        return life

    def _look(self) -> Found:
        report = self._journals / "report"
        report.unlink(missing_ok=True)
        lossy = self._promises.lossy_buckets
        status = self._server.run(
            Look(self._kind, str(self._store), str(report), self._buckets, bool(lossy))
        )
        self.tally.looks += 1
        if status != 0:
            self._fail([f"the process that looks ended with exit status {status}"])
        return msgspec.json.decode(report.read_bytes(), type=Found)

    def _fail(self, wrong: list[str]) -> None:
        flag = "--cuts" if self._cut else "--kills"
        lines = [
            f"{self._kind} after {self.tally.kills} kills, cuts since the last look: {self._cuts}",
            f"repeat: python -m tests.crash {flag} {self.tally.kills} --kind {self._kind}"
            f" --seed {self._seed}" + (" --async" if self._has_async else ""),
            *wrong[:20],
        ]
        raise StoreFailed("\n".join(lines))


def _state(found: Found) -> dict[Name, Value]:
    return {
        (bucket, key): value
        for bucket, values in found.values.items()
        for key, value in values.items()
    }
