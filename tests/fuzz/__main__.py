"""`python -m tests.fuzz`: attacks parsers and servers with inputs that a seed decides.

--seed S      other inputs; the same seed gives the same ones
--inputs N    in all; without it, what takes about two minutes
--part NAME   only this one, with all of the inputs; may be repeated
--first I     number of the first input, to repeat one that failed
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tests.fuzz import admin_api
from tests.fuzz.attack import attack
from tests.fuzz.campaign import Outcome, fuzz_parser
from tests.fuzz.parsers import PARSERS
from tests.fuzz.servers import Servers, served

# Inputs of a run of about two minutes; other runs divide theirs in the same way.
SHARES = {
    **dict.fromkeys((parser.name for parser in PARSERS), 15_000),
    "settings": 3_000,
    "http": 12_000,
    "storage": 5_000,
    "targets": 3_000,
}
ADMIN_EXAMPLES = 4  # of each operation, beside those that its description leads to
ADMIN_TIME_S = 40
WARM_UP_INPUTS = 3_000
BATCHES = 5  # readings of memory in between


def main() -> int:
    """Run the parts; the exit status says whether anything failed."""
    options = _options()
    parts = options.part or [*SHARES, admin_api.PART]
    outcomes: list[Outcome] = []
    for part in parts:
        outcomes.append(_run(part, options, _indices(options, part, parts)))
        _report(outcomes[-1])
    inputs = sum(outcome.inputs for outcome in outcomes)
    failures = sum(outcome.failure_count for outcome in outcomes)
    print(f"{inputs} inputs, {failures} failures, seed {options.seed}")
    return 1 if failures else 0


def _run(part: str, options: argparse.Namespace, indices: range) -> Outcome:
    if part == admin_api.PART:
        return admin_api.fuzz_admin(options.seed, ADMIN_EXAMPLES, ADMIN_TIME_S)
    parser = next((parser for parser in PARSERS if parser.name == part), None)
    if parser is not None:
        return fuzz_parser(parser, options.seed, indices)
    with served() as servers:  # of its own, so that a part that breaks them breaks no other
        return attack_part(servers, part, options.seed, indices)


def attack_part(servers: Servers, part: str, seed: int, indices: range) -> Outcome:
    """One part: a warm-up, then batches with a reading of what the servers hold after each."""
    whole = Outcome(part)
    warm_up = min(len(indices) // 2, WARM_UP_INPUTS)
    _join(whole, attack(servers, part, seed, indices[:warm_up]))
    before = servers.readings()
    _note(whole, servers)
    rest = indices[warm_up:]
    step = max(1, -(-len(rest) // BATCHES))
    for start in range(0, len(rest), step):
        _join(whole, attack(servers, part, seed, rest[start : start + step]))
        _note(whole, servers)
    whole.defects += servers.defects(before)
    return whole


def _join(whole: Outcome, part: Outcome) -> None:
    whole.inputs += part.inputs
    whole.elapsed_s += part.elapsed_s
    whole.failures += part.failures
    whole.answers += part.answers


def _note(outcome: Outcome, servers: Servers) -> None:
    held = "; ".join(f"{name} {reading}" for name, reading in servers.readings().items())
    print(f"  {outcome.part}, after {outcome.inputs} inputs: {held}", flush=True)


def _report(outcome: Outcome) -> None:
    print(outcome)
    if outcome.answers:
        print("  answers:", ", ".join(f"{kind} {n}" for kind, n in outcome.answers.most_common(20)))
    for line in (*outcome.notes, *outcome.defects, *outcome.failures):
        print(f"  {line}")
    sys.stdout.flush()


def _indices(options: argparse.Namespace, part: str, parts: Sequence[str]) -> range:
    count = SHARES.get(part, 0)
    if options.inputs:
        whole = sum(SHARES.get(name, 0) for name in parts)
        count = -(-options.inputs * count // max(1, whole))
    return range(options.first, options.first + count)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.fuzz")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--inputs", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--part", action="append", choices=[*SHARES, admin_api.PART])
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
