"""The commit log, and a server's part in it: the rules of `engines/shared/log`, with costs in place
of the work.

A record is judged at the log's end, appended if the log still ends there, and replayed by every
other server. Changes of one server that wait at once become one record. A server that lost three
races asks for its turn, by the real `AppendTurns`.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from benchmarks.scale_out.index_costs import IndexCosts
from benchmarks.scale_out.virtual_clock import Bell, Process, VirtualClock
from objectcache_schemas.limits import MIB
from objectcache_storage_server.engines.shared.log.change_line import GROUP_MAX
from objectcache_storage_server.engines.shared.log.make_record import LOST_RACES_MAX, TURN_TRIES
from objectcache_storage_server.engines.shared.log.replay import READ_BYTES
from objectcache_storage_server.engines.shared.log.turns import AppendTurns

RECORD_BYTES_MAX = 4 * MIB
Steps = Generator["float | Bell", None, None]
Tried = Generator["float | Bell", None, bool]


@dataclass(frozen=True, slots=True)
class StoreTimes:
    """What the store takes, on average. By default what a RADOS on loopback took."""

    append_s: float = 0.8e-3
    append_bytes_per_s: float = 300e6
    read_s: float = 0.4e-3
    bell_s: float = 1.0e-3  # from the acknowledgement until another server is woken
    steady_share: float = 0.6  # of each, which every call takes; the rest is exponential

    def appending_s(self, size_bytes: float, chooser: random.Random) -> float:
        """Until a record is acknowledged."""
        return self._drawn(self.append_s, chooser) + size_bytes / self.append_bytes_per_s

    def reading_s(self, chooser: random.Random) -> float:
        """Until records are read, or it is known that there are none."""
        return self._drawn(self.read_s, chooser)

    def ringing_s(self, chooser: random.Random) -> float:
        """Until another server is woken."""
        return self._drawn(self.bell_s, chooser)

    def _drawn(self, mean_s: float, chooser: random.Random) -> float:
        chance = (1 - self.steady_share) * chooser.expovariate(1.0)
        return mean_s * (self.steady_share + chance)


@dataclass(slots=True)
class Change:
    """A commit in line: `blocks` of a put, or `used` extents of a heartbeat."""

    began_s: float
    ended: Callable[[], None]
    blocks: tuple[int, ...] = ()
    used: int = 0


@dataclass(slots=True)
class Record:
    """One record of the log."""

    number: int
    writer: int
    chunks: int
    used: int
    size_bytes: float
    turn_s: float | None
    readable_s: float
    applied_by: int = 0  # servers, its maker among them


@dataclass
class CommitLog:
    """What the store holds: the log, and which record stored a block."""

    clock: VirtualClock
    times: StoreTimes
    costs: IndexCosts
    chunks_per_block: int
    chooser: random.Random
    records: list[Record] = field(default_factory=list)
    stored: dict[int, int] = field(default_factory=dict)
    readable: int = 0  # records that may be read
    bell: Bell = field(default_factory=Bell)
    lag_s: array[float] = field(default_factory=lambda: array("d"))
    commit_s: array[float] = field(default_factory=lambda: array("d"))
    lost_races: int = 0
    turns_asked: int = 0

    def is_readable(self, block: int) -> bool:
        """Whether a server that has replayed all knows it."""
        number = self.stored.get(block)
        return number is not None and number < self.readable

    def append(self, record: Record) -> bool:
        """Whether it is the log's next record."""
        if record.number != len(self.records):
            return False
        self.records.append(record)
        return True

    def show(self, record: Record) -> None:
        """It is acknowledged."""
        record.readable_s = self.clock.now_s
        self.readable = record.number + 1
        self.clock.after(self.times.ringing_s(self.chooser), self.bell.ring)


class LogServer:
    """One server: its index's end, its line of changes, and who changes the index."""

    def __init__(self, log: CommitLog, writer: int) -> None:
        self.writer = writer
        self.is_lost = False
        self.end = 0  # number of the next record to apply
        self.replay_s = 0.0  # of a processor
        self.judge_s = 0.0
        self.appended = 0  # records
        self.caught_up_s: float | None = None  # when it had come to the log's end first
        self._log = log
        self._turns = AppendTurns()
        self._line: deque[Change] = deque()
        self._is_led = False
        self._is_locked = False
        self._unlocked = Bell()
        log.clock.start(self._follow(), self._goes_on)

    def _goes_on(self) -> bool:
        return not self.is_lost

    def commit(self, change: Change) -> None:
        """Stand in line."""
        self._line.append(change)
        if not self._is_led:
            self._is_led = True
            self._log.clock.start(self._lead(), self._goes_on)

    def knows(self, block: int) -> bool:
        """Whether the record that stored it was replayed here."""
        number = self._log.stored.get(block)
        return number is not None and number < self.end

    # --- making records ---

    def _lead(self) -> Process:
        while self._line:
            yield from self._lock()
            group = [self._line.popleft()]
            yield from self._make(group)
            self._unlock()
            now_s = self._log.clock.now_s
            for change in group:
                if change.blocks:
                    self._log.commit_s.append(now_s - change.began_s)
                change.ended()
        self._is_led = False

    def _make(self, group: list[Change]) -> Steps:
        lost = 0
        while True:
            yield from self._wait_for_turn()
            self._gather(group)
            begun_s = self._log.clock.now_s
            if (yield from self._try(group, None)):
                return
            lost += 1
            wanted_s = TURN_TRIES * (self._log.clock.now_s - begun_s)
            yield from self._follow_winner()
            if lost >= LOST_RACES_MAX:
                self._log.turns_asked += 1
                while not (yield from self._try([], wanted_s)):
                    yield from self._follow_winner()
                lost = 0

    def _gather(self, group: list[Change]) -> None:
        while self._line and len(group) < GROUP_MAX:
            size_bytes = self._size_bytes([*group, self._line[0]])
            if size_bytes > RECORD_BYTES_MAX:
                return
            group.append(self._line.popleft())

    def _new_blocks(self, group: list[Change]) -> list[int]:
        """What is not stored yet, by the index here: keys are immutable."""
        blocks = dict.fromkeys(block for change in group for block in change.blocks)
        return [block for block in blocks if not self.knows(block)]

    def _size_bytes(self, group: list[Change]) -> float:
        chunks = sum(len(change.blocks) for change in group) * self._log.chunks_per_block
        return self._log.costs.size_bytes(chunks, sum(change.used for change in group))

    def _try(self, group: list[Change], turn_s: float | None) -> Tried:
        """Judge and append once; whether the record is in the log."""
        log = self._log
        blocks = self._new_blocks(group)
        chunks = len(blocks) * log.chunks_per_block
        used = sum(change.used for change in group)
        spent_s = log.costs.judge_s(chunks, used)
        self.judge_s += spent_s
        yield spent_s
        if not blocks and not used and turn_s is None:
            return (yield from self._is_at_end())
        size_bytes = log.costs.size_bytes(chunks, used)
        record = Record(self.end, self.writer, chunks, used, size_bytes, turn_s, 0.0)
        appending_s = log.times.appending_s(size_bytes, log.chooser)
        yield appending_s / 2
        if not log.append(record):
            log.lost_races += 1
            yield appending_s / 2
            return False
        for block in blocks:
            log.stored.setdefault(block, record.number)
        log.clock.after(appending_s / 2, lambda: log.show(record))  # whatever becomes of its maker
        yield appending_s / 2
        self._applied(record)
        self.appended += 1
        return True

    def _is_at_end(self) -> Tried:
        """What changes nothing was judged at the log's end, too."""
        yield self._log.times.reading_s(self._log.chooser)
        is_at_end = self._log.readable <= self.end
        self._log.lost_races += not is_at_end
        return is_at_end

    def _wait_for_turn(self) -> Steps:
        while (wait_s := self._turns.wait_s(self.writer, self._log.clock.now_s)) > 0:
            until_s = self._log.clock.now_s + wait_s
            while self._log.readable <= self.end and self._log.clock.now_s < until_s:
                yield min(self._log.times.bell_s, until_s - self._log.clock.now_s)
            yield from self._step()

    def _follow_winner(self) -> Steps:
        while self._log.readable <= self.end:  # an object that is written to is read after that
            yield self._log.times.read_s / 4
        yield from self._step()

    # --- following ---

    def _follow(self) -> Process:
        while True:
            while self._log.readable <= self.end:
                self._note_caught_up()
                yield self._log.bell
            yield self._log.times.reading_s(self._log.chooser)
            yield from self._lock()
            yield from self._apply()
            self._unlock()

    def _note_caught_up(self) -> None:
        if self.caught_up_s is None:
            self.caught_up_s = self._log.clock.now_s

    def _step(self) -> Steps:
        yield self._log.times.reading_s(self._log.chooser)
        yield from self._apply()

    def _apply(self) -> Steps:
        """Apply what may be read, READ_BYTES of it at most; they are seen together."""
        some: list[Record] = []
        size_bytes, spent_s = 0.0, 0.0
        for number in range(self.end, self._log.readable):
            record = self._log.records[number]
            if some and size_bytes + record.size_bytes > READ_BYTES:
                break
            some.append(record)
            size_bytes += record.size_bytes
            spent_s += self._log.costs.apply_s(record.chunks, record.used)
        self.replay_s += spent_s
        yield spent_s
        for record in some:
            self._applied(record)
            if self.caught_up_s is not None:
                self._log.lag_s.append(self._log.clock.now_s - record.readable_s)

    def _applied(self, record: Record) -> None:
        assert record.number == self.end, "records are applied in order, each once"
        self.end += 1
        record.applied_by += 1
        self._turns.saw(record.writer, record.turn_s, self._log.clock.now_s)

    # --- who changes the index ---

    def _lock(self) -> Steps:
        while self._is_locked:
            yield self._unlocked
        self._is_locked = True

    def _unlock(self) -> None:
        self._is_locked = False
        self._unlocked.ring()
