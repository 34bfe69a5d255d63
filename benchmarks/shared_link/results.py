"""What the rounds came to. Arithmetic alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

Times = Mapping[str, float]  # seconds, by request


@dataclass(frozen=True, slots=True)
class Round:
    """All requests at once, under one policy: TTFT of each, and how many of their deliveries had a
    window of the engine's own.
    """

    policy: str
    ttft_s: Times
    own_windows: int


@dataclass(frozen=True, slots=True)
class Results:
    """`alone_s` is each request's TTFT alone on the link, of which nobody else has a part."""

    alone_s: Times
    rounds: tuple[Round, ...]

    def policies(self) -> list[str]:
        """In the order in which they were run."""
        return list(dict.fromkeys(one.policy for one in self.rounds))

    def added_s(self, policy: str, request: str) -> float:
        """What the others cost a request, the median of the rounds."""
        return median(
            one.ttft_s[request] - self.alone_s[request]
            for one in self.rounds
            if one.policy == policy
        )

    def totals_s(self, policy: str) -> list[float]:
        """Added TTFT of all requests together, by round."""
        return [
            sum(one.ttft_s[request] - alone_s for request, alone_s in self.alone_s.items())
            for one in self.rounds
            if one.policy == policy
        ]

    def total_s(self, policy: str) -> float:
        """The median of the rounds."""
        return median(self.totals_s(policy))

    def ratio(self, policy: str, to: str) -> float:
        """Added TTFT under one policy over that under another, medians of the rounds."""
        return self.total_s(policy) / self.total_s(to)

    def own_windows(self) -> tuple[int, int]:
        """Deliveries of the rounds with a window of the engine's own, and all."""
        return sum(one.own_windows for one in self.rounds), len(self.rounds) * len(self.alone_s)


def table(results: Results, dynamic: str, bases: Sequence[str]) -> str:
    """For a terminal and for docs/performance.md; milliseconds."""
    policies = results.policies()
    lines = [
        "| request | alone | " + " | ".join(f"added, {name}" for name in policies) + " |",
        "| --- | ---: |" + " ---: |" * len(policies),
    ]
    for request, alone_s in results.alone_s.items():
        cells = [f"{1e3 * results.added_s(name, request):,.0f}" for name in policies]
        lines.append(f"| {request} | {1e3 * alone_s:,.0f} | " + " | ".join(cells) + " |")
    totals = [_spread(results.totals_s(name)) for name in policies]
    lines.append("| **all together** | | " + " | ".join(totals) + " |")
    own, count = results.own_windows()
    lines += ["", f"{own} of {count} deliveries had a window of the engine's own."]
    lines += [f"{dynamic} / {base}: {results.ratio(dynamic, base):.2f}" for base in bases]
    return "\n".join(lines)


def _spread(totals_s: Sequence[float]) -> str:
    return (
        f"{1e3 * median(totals_s):,.0f} ({1e3 * min(totals_s):,.0f} to {1e3 * max(totals_s):,.0f})"
    )
