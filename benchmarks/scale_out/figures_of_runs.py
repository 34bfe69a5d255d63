"""The figures of a simulated run, what is beyond its limit first, and tables of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.scale_out.fleet_simulation import BYTES_PER_GBIT, JOIN_S, FleetPlan, Outcome, Phase

BALANCE_GOAL = 1.15
LINK_SHARE_MAX = 0.8  # of a direction, averaged over the run
CORE_SHARE_MAX = 0.8  # one thread replays and judges at a time
COMMIT_P99_S_MAX = 0.5
LAG_P99_S_MAX = 0.25


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run. Rates are means over it, shares those of the busiest server."""

    servers: int
    engines: int
    chunk_tokens: int
    requests: int
    open: int  # had not come to their end when the run was given up
    retries: int
    moves: int
    records_per_s: float
    log_bytes_per_s: float
    chunks_per_s: float
    replay_share: float  # of a core
    judge_share: float
    out_share: float  # of the link
    into_share: float
    engine_share: float
    lag_s: tuple[float, float]  # p50, p99
    commit_s: tuple[float, float]
    get_s: tuple[float, float]
    put_s: tuple[float, float]
    lost_races: int
    turns_asked: int
    matched_blocks: int
    unseen_blocks: int
    ready_after_s: float | None
    phases: tuple[Phase, ...]

    @property
    def beyond(self) -> list[str]:
        """What is beyond its limit."""
        limits = {
            "link": max(self.out_share, self.into_share) > LINK_SHARE_MAX,
            "replay": self.replay_share + self.judge_share > CORE_SHARE_MAX,
            "log": self.commit_s[1] > COMMIT_P99_S_MAX,
            "lag": self.lag_s[1] > LAG_P99_S_MAX,
        }
        return [name for name, is_beyond in limits.items() if is_beyond]


def figures_of(plan: FleetPlan, outcome: Outcome) -> Figures:
    """Of a run that has ended."""
    log, lasts_s = outcome.log, outcome.ended_s - JOIN_S
    link_bytes = plan.link_gbps * BYTES_PER_GBIT * lasts_s
    servers = outcome.servers
    return Figures(
        servers=plan.servers,
        engines=plan.engines,
        chunk_tokens=plan.chunk_tokens,
        requests=len(outcome.servings),
        open=outcome.open,
        retries=outcome.retries,
        moves=outcome.moves,
        records_per_s=len(log.records) / lasts_s,
        log_bytes_per_s=sum(record.size_bytes for record in log.records) / lasts_s,
        chunks_per_s=sum(record.chunks for record in log.records) / lasts_s,
        replay_share=max(one.index.replay_s for one in servers) / lasts_s,
        judge_share=max(one.index.judge_s for one in servers) / lasts_s,
        out_share=max(one.out.carried_bytes for one in servers) / link_bytes,
        into_share=max(one.into.carried_bytes for one in servers) / link_bytes,
        engine_share=sum(one.busy_s for one in outcome.engines) / plan.engines / lasts_s,
        lag_s=_p50_p99(log.lag_s),
        commit_s=_p50_p99(log.commit_s),
        get_s=_p50_p99(outcome.get_s),
        put_s=_p50_p99(outcome.put_s),
        lost_races=log.lost_races,
        turns_asked=log.turns_asked,
        matched_blocks=outcome.matched_blocks,
        unseen_blocks=outcome.unseen_blocks,
        ready_after_s=outcome.ready_after_s,
        phases=tuple(outcome.phases),
    )


def _p50_p99(values: Sequence[float]) -> tuple[float, float]:
    if not values:
        return 0.0, 0.0
    ordered = sorted(values)
    last = len(ordered) - 1
    return ordered[last // 2], ordered[round(last * 0.99)]


def described(figures: Figures) -> str:
    """A run with events, in lines."""
    unseen = figures.unseen_blocks / max(1, figures.matched_blocks + figures.unseen_blocks)
    lines = [
        f"G={figures.chunk_tokens}: {figures.servers} servers, {figures.engines} engines, "
        f"{figures.requests} requests, {figures.retries} begun again, {figures.open} not ended, "
        f"{figures.moves} sessions moved",
        f"  log: {figures.records_per_s:.0f} records/s, {figures.log_bytes_per_s / 1e6:.2f} MB/s, "
        f"{figures.chunks_per_s:.0f} chunks/s; {figures.lost_races} races lost, "
        f"{figures.turns_asked} turns asked for",
        f"  a server: replay {figures.replay_share:.3f} core, judging {figures.judge_share:.3f}, "
        f"link out {figures.out_share:.2f}, in {figures.into_share:.2f}; "
        f"engines at work {figures.engine_share:.2f}",
        f"  ms, p50 and p99: lag {_ms(figures.lag_s)}, commit {_ms(figures.commit_s)}, "
        f"get {_ms(figures.get_s)}, put {_ms(figures.put_s)}",
        f"  found too late by the lag: {unseen:.2%} of the blocks that were stored",
    ]
    if figures.ready_after_s is not None:
        lines.append(
            f"  the server that was added had replayed all after {figures.ready_after_s:.1f} s"
        )
    for phase in figures.phases:
        parts = (
            f"{name} {one.most:.2f} (least {one.least:.2f})"
            for name, one in (
                ("sessions", phase.sessions),
                ("their bytes", phase.bound),
                ("bytes without a target", phase.free),
                ("all bytes", phase.both),
            )
        )
        lines.append(f"  most over mean, {phase.name}: {', '.join(parts)}")
    return "\n".join(lines)


def table(runs: Sequence[Figures]) -> str:
    """A line for each run of a sweep, as Markdown."""
    lines = [
        "| G | servers | engines | records/s | MB/s of log | lag p99 ms | commit p50, p99 ms "
        "| replay, judging core | link out, in | beyond |",
        "|" + " --- |" * 10,
    ]
    for one in runs:
        cells = (
            str(one.chunk_tokens),
            str(one.servers),
            str(one.engines),
            f"{one.records_per_s:.0f}",
            f"{one.log_bytes_per_s / 1e6:.2f}",
            f"{one.lag_s[1] * 1e3:.1f}",
            _ms(one.commit_s),
            f"{one.replay_share:.2f}, {one.judge_share:.2f}",
            f"{one.out_share:.2f}, {one.into_share:.2f}",
            " ".join(one.beyond) or "-",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _ms(pair: tuple[float, float]) -> str:
    return f"{pair[0] * 1e3:.1f}, {pair[1] * 1e3:.1f}"
