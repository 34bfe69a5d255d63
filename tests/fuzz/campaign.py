"""Runs a part of the fuzzing and keeps what failed, with the command that repeats it."""

from __future__ import annotations

import faulthandler
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.fuzz.mutation import mutated, random_for
from tests.fuzz.parsers import REFUSALS, Parser

FAILURES_MAX = 20
# For so many inputs of a parser: the slowest takes 7 ms of a processor for each.
HANG_INPUTS, HANG_S = 64, 60.0


@dataclass(frozen=True, slots=True)
class Failure:
    """One input that was not borne."""

    part: str
    seed: int
    index: int
    what: str
    sent: bytes

    def __str__(self) -> str:
        repeat = f"python -m tests.fuzz --part {self.part} --seed {self.seed} --first {self.index}"
        return f"{self.what}\n  sent {self.sent[:400]!r}\n  repeat with: {repeat} --inputs 1"


@dataclass(slots=True)
class Outcome:
    """What a part did."""

    part: str
    inputs: int = 0
    elapsed_s: float = 0.0
    failures: list[Failure] = field(default_factory=list)
    defects: list[str] = field(default_factory=list)  # of the servers, of no one input
    notes: list[str] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)

    @property
    def failure_count(self) -> int:
        """Inputs that failed, and defects."""
        return len(self.failures) + len(self.defects)

    def __str__(self) -> str:
        rate = self.inputs / self.elapsed_s if self.elapsed_s else 0.0
        failed = f"{self.failure_count} failures" if self.failure_count else "no failure"
        return f"{self.part}: {self.inputs} inputs, {rate:,.0f} a second, {failed}"


def fuzz_parser(parser: Parser, seed: int, indices: Iterable[int]) -> Outcome:
    """Feed a parser; whatever it raises besides its refusals is a failure, and so is a hang."""
    outcome = Outcome(parser.name)
    begun_s = time.monotonic()
    for index in indices:
        if index % HANG_INPUTS == 0:
            faulthandler.dump_traceback_later(HANG_S, exit=True)
        data = mutated(random_for(seed, parser.name, index), parser.seeds)
        outcome.inputs += 1
        try:
            parser.read(data)
        except REFUSALS:
            pass
        except Exception:
            outcome.failures.append(
                Failure(parser.name, seed, index, traceback.format_exc(limit=-4), data)
            )
            if len(outcome.failures) >= FAILURES_MAX:
                break
    faulthandler.cancel_dump_traceback_later()
    outcome.elapsed_s = time.monotonic() - begun_s
    return outcome
