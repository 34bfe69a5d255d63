"""What the suite says about the server: verdicts, the table per area, and what contradicts
`expected_failures.txt`.
"""

from __future__ import annotations

import enum
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.s3_tests.areas import AREAS, Tier, area_of

EXPECTED_FILE = Path(__file__).with_name("expected_failures.txt")
# 501 refuses what is not implemented and 503 is a limit; any other 5xx is a defect.
SERVER_ERRORS_ALLOWED = frozenset({501, 503})
SCHEMES = ("http", "https")
STRICT_TIERS = (Tier.MUST, Tier.SHOULD)


class Outcome(enum.Enum):
    """What a test came to."""

    PASSED = "passed"
    FAILED = "failed"
    ERROR = "error"  # it could not be judged
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One test's outcome and what it was answered on the wire."""

    test: str  # with its parameters
    node: str  # by which pytest finds it
    outcome: Outcome
    message: str
    statuses: Mapping[int, int]

    @property
    def server_errors(self) -> tuple[int, ...]:
        """Statuses that are defects of the server."""
        errors = (status for status in self.statuses if status >= 500)
        return tuple(sorted(status for status in errors if status not in SERVER_ERRORS_ALLOWED))

    @property
    def is_good(self) -> bool:
        """Whether nothing is left to complain of."""
        return self.outcome in (Outcome.PASSED, Outcome.SKIPPED)


def read_verdicts(record: Path) -> dict[str, Verdict]:
    """Verdicts by test from the recorder's lines. The last line of a test counts, and the server
    errors of all of them.
    """
    verdicts: dict[str, Verdict] = {}
    lines = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
    for line in lines:
        fields = json.loads(line)
        test = fields["test"]
        statuses = Counter({int(status): count for status, count in fields["statuses"].items()})
        if test in verdicts:
            statuses += Counter(verdicts[test].statuses)
        outcome = Outcome(fields["outcome"])
        verdicts[test] = Verdict(test, fields["node"], outcome, fields["message"], statuses)
    return verdicts


def read_expected(scheme: str, file: Path = EXPECTED_FILE) -> dict[str, str]:
    """Reasons by test of what is expected to fail over `scheme`.

    A line is `test: reason`, a scheme before the test means that one only, # begins a comment.
    Raises `ValueError` for any other.
    """
    expected: dict[str, str] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        named, _, reason = line.partition(":")
        only, _, test = named.strip().rpartition(" ")
        if not reason.strip() or only not in ("", *SCHEMES) or test in expected:
            raise ValueError(f"{file.name}: {line!r} must be: [http|https] test: reason")
        if only in ("", scheme):
            expected[test] = reason.strip()
    return expected


def complaints(
    verdicts: Mapping[str, Verdict], expected: Mapping[str, str], *, is_whole: bool
) -> list[str]:
    """Why the run fails, one line each; `is_whole` tells whether every test was to run."""
    lines: list[str] = []
    for verdict in verdicts.values():
        lines += _complaints_of(verdict, expected)
    if is_whole:
        unknown = sorted(test for test in expected if test not in verdicts)
        lines += [f"{test}: expected to fail, and not in the suite" for test in unknown]
    return lines


def _complaints_of(verdict: Verdict, expected: Mapping[str, str]) -> list[str]:
    area = area_of(verdict.test)
    lines = [f"{verdict.test}: answered {status}" for status in verdict.server_errors]
    if area is None:
        return [*lines, f"{verdict.test}: no area of areas.py fits it"]
    if verdict.outcome is Outcome.PASSED and verdict.test in expected:
        return [*lines, f"{verdict.test}: expected to fail, and passes"]
    is_judged = area.tier in STRICT_TIERS and verdict.test not in expected
    if is_judged and not verdict.is_good:
        lines.append(f"{verdict.test}: {verdict.outcome.value}: {verdict.message}")
    return lines


@dataclass(frozen=True, slots=True)
class Row:
    """Counts of one area, or of a tier."""

    tier: Tier
    area: str
    counts: Counter[Outcome]

    @property
    def test_count(self) -> int:
        """How many tests ran or were skipped."""
        return self.counts.total()

    def __str__(self) -> str:
        passed, skipped = self.counts[Outcome.PASSED], self.counts[Outcome.SKIPPED]
        failed = self.counts[Outcome.FAILED] + self.counts[Outcome.ERROR]
        return f"{passed} / {failed} / {skipped}"


def rows(verdicts: Iterable[Verdict]) -> list[Row]:
    """One row an area, then one a tier; areas without a test are left out."""
    by_area: dict[str, Counter[Outcome]] = {area.name: Counter() for area in AREAS}
    by_tier: dict[Tier, Counter[Outcome]] = {tier: Counter() for tier in Tier}
    tiers = {area.name: area.tier for area in AREAS}
    for verdict in verdicts:
        area = area_of(verdict.test)
        if area is not None:
            by_area[area.name][verdict.outcome] += 1
            by_tier[area.tier][verdict.outcome] += 1
    order = list(Tier)
    names = sorted(by_area, key=lambda name: (order.index(tiers[name]), name))
    areas = [Row(tiers[name], name, by_area[name]) for name in names]
    totals = [Row(tier, "total", counts) for tier, counts in by_tier.items()]
    return [row for row in areas + totals if row.test_count]
