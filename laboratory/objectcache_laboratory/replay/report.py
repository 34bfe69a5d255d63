"""What came of a replay: totals and percentiles, as a value and as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from rich.table import Table

from objectcache_laboratory.replay.run import RequestOutcome
from objectcache_schemas.limits import GIB, MIB


class Spread(msgspec.Struct, frozen=True):
    """A time's distribution, in seconds; `count` 0 has no figures."""

    count: int
    p50_s: float | None = None
    p99_s: float | None = None
    max_s: float | None = None


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over all requests of a replay."""

    requests: int
    blocks: int
    matched_blocks: int
    expected_blocks: int  # an empty store that is asked one request at a time
    untimely_blocks: int  # of those that were missed: asked for before who puts them had ended
    tokens: int
    matched_tokens: int
    fetched_bytes: int
    put_bytes: int
    wrong_bytes: int
    errors: dict[str, int]  # code to how often
    error_messages: dict[str, str]  # code to the first message
    elapsed_s: float
    match: Spread
    first_layer: Spread
    last_layer: Spread
    put: Spread
    late: Spread

    @property
    def failed(self) -> bool:
        """Whether any byte was wrong or any request failed."""
        return self.wrong_bytes > 0 or bool(self.errors)


def summarise(
    outcomes: Sequence[RequestOutcome], askers: Sequence[Sequence[int]], elapsed_s: float
) -> ReplayReport:
    """Add up the outcomes of a replay that took `elapsed_s`; `askers` are `first_askers`."""
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    return ReplayReport(
        requests=len(outcomes),
        blocks=sum(outcome.block_count for outcome in outcomes),
        matched_blocks=sum(outcome.matched_blocks for outcome in outcomes),
        expected_blocks=sum(map(len, askers)),
        untimely_blocks=sum(
            outcomes[asker].ended_s > outcome.begun_s
            for outcome, firsts in zip(outcomes, askers, strict=True)
            for asker in firsts[outcome.matched_blocks :]
        ),
        tokens=sum(outcome.token_count for outcome in outcomes),
        matched_tokens=sum(outcome.matched_tokens for outcome in outcomes),
        fetched_bytes=sum(outcome.fetched_bytes for outcome in outcomes),
        put_bytes=sum(outcome.put_bytes for outcome in outcomes),
        wrong_bytes=sum(outcome.wrong_bytes for outcome in outcomes),
        errors=dict(Counter(error.code for error in errors)),
        error_messages={error.code: error.message for error in reversed(errors)},
        elapsed_s=elapsed_s,
        match=spread(outcome.match_s for outcome in outcomes),
        first_layer=spread(outcome.first_layer_s for outcome in outcomes),
        last_layer=spread(outcome.last_layer_s for outcome in outcomes),
        put=spread(outcome.put_s for outcome in outcomes),
        late=spread(outcome.late_s or None for outcome in outcomes),
    )


def spread(times_s: Iterable[float | None]) -> Spread:
    """Median, 99th percentile and maximum of the times that happened."""
    happened_s = [time_s for time_s in times_s if time_s is not None]
    if not happened_s:
        return Spread(0)
    p50_s, p99_s = np.percentile(happened_s, [50, 99])
    return Spread(len(happened_s), float(p50_s), float(p99_s), max(happened_s))


def report_table(report: ReplayReport) -> Table:
    """The report for people."""
    table = Table(title="Trace replay", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, text in _rows(report):
        table.add_row(name, text)
    return table


def _rows(report: ReplayReport) -> Iterable[tuple[str, str]]:
    yield "requests", f"{report.requests:,} in {report.elapsed_s:.2f} s"
    yield "hit rate, blocks", _share(report.matched_blocks, report.blocks)
    yield "  of an ideal store", _share(report.expected_blocks, report.blocks)
    if report.untimely_blocks:
        yield "  missed, being put just then", f"{report.untimely_blocks:,}; --concurrency 1 waits"
    yield "hit rate, tokens", _share(report.matched_tokens, report.tokens)
    yield "fetched", _volume(report.fetched_bytes, report.elapsed_s)
    yield "put", _volume(report.put_bytes, report.elapsed_s)
    yield "match", _times(report.match)
    yield "time to first layer", _times(report.first_layer)
    yield "time to last layer", _times(report.last_layer)
    yield "put of a request's new blocks", _times(report.put)
    if report.late.count:
        yield "begun late", f"{report.late.count:,} requests, {_times(report.late)}"
    yield "errors", f"{sum(report.errors.values()):,}"
    for code, count in report.errors.items():
        yield f"  {count:,} {code}", report.error_messages[code]
    yield "wrong bytes", f"{report.wrong_bytes:,}"


def _share(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,}, {100 * part / max(1, whole):.1f} %"


def _volume(count_bytes: int, elapsed_s: float) -> str:
    rate = count_bytes / max(elapsed_s, 1e-9) / MIB
    return f"{count_bytes / GIB:.3f} GiB, {rate:,.0f} MiB/s over the whole replay"


def _times(times: Spread) -> str:
    if times.p50_s is None or times.p99_s is None:
        return "none"
    return f"p50 {1000 * times.p50_s:.2f} ms, p99 {1000 * times.p99_s:.2f} ms"
