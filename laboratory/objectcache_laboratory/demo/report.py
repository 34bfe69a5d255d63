"""The outcome for people: a table, a timeline, one line that says whether the answers agree."""

from __future__ import annotations

from rich.table import Table

from objectcache_laboratory.demo.conversation import DELIVERIES, REUSE_RUNS
from objectcache_laboratory.demo.results import DemoResult, TurnMeasurement
from objectcache_laboratory.demo.timeline_text import LEGEND, timeline_rows
from objectcache_laboratory.reference_engine.engine import RECOMPUTATION_TOLERANCE

TIMELINE_COLUMNS = 60
TIMELINE_COLUMNS_MIN = 16
TIMELINE_TEXT_COLUMNS = 43  # of a row beside the bar


def turns_table(result: DemoResult) -> Table:
    """One row a turn; times are to the first token, in milliseconds."""
    table = Table(
        title="Time to first token in ms, by where the KV of the prefix comes from",
        caption=f"Recomputed: one run; fetched: the median of {REUSE_RUNS}. "
        "A link is a relay on this host that the kernel paces.",
        box=None,
        padding=(0, 1),
        collapse_padding=True,
        pad_edge=False,
    )
    headings = ["turn", "tokens", "hit\nrate", "fetched\nMiB", "recom-\nputed"]
    for path in result.paths:
        headings += [f"{path}\n{delivery}" for delivery in DELIVERIES]
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for turn in result.turns:
        table.add_row(*_turn_cells(turn, result.paths))
    return table


def slow_table(turn: TurnMeasurement, gbit_per_s: int) -> Table:
    """What the link carried for one turn, plain and encoded, and when its first token was there."""
    table = Table(
        title=f"Turn {turn.turn} over {gbit_per_s} Gbit/s, layerwise, as it is and encoded",
        caption="No bit is lost; the engine decodes. Of float32 one byte in four shrinks, of "
        "bfloat16 every other.",
        box=None,
        padding=(0, 1),
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column("chunks")
    for heading in ("MiB on the wire", "MiB delivered", "ms to first token"):
        table.add_column(heading, justify="right", no_wrap=True)
    for reuse in turn.slow_reuses:
        wire, delivered = _mib(reuse.wire_bytes), _mib(turn.fetched_bytes)
        table.add_row(reuse.path, wire, delivered, _ms(reuse.ttft_s))
    return table


def turn_line(turn: TurnMeasurement) -> str:
    """One finished turn in one line, for the progress."""
    stored = f"{turn.stored_chunks} chunk{'s' * (turn.stored_chunks != 1)} stored"
    if not turn.reuses:
        return (
            f"turn {turn.turn}: {turn.prompt_tokens:,} tokens computed in "
            f"{_ms(turn.recompute_ttft_s)} ms, {stored}"
        )
    fastest_s = min(reuse.ttft_s for reuse in turn.reuses)
    return (
        f"turn {turn.turn}: {turn.hit_tokens:,} of {turn.prompt_tokens:,} tokens fetched, first "
        f"token in {_ms(fastest_s)} instead of {_ms(turn.recompute_ttft_s)} ms, {stored}"
    )


def timeline_text(turn: TurnMeasurement, path: str, width: int) -> str:
    """Layers against time for the layerwise reuse over `path`, at most `width` columns wide."""
    layerwise = turn.reuse(path, "layerwise")
    assert layerwise is not None
    columns = max(min(TIMELINE_COLUMNS, width - TIMELINE_TEXT_COLUMNS), TIMELINE_COLUMNS_MIN)
    title = f"Turn {turn.turn}, layerwise, {path}: 0 to {_ms(layerwise.ttft_s)} ms"
    return "\n".join([title, *timeline_rows(layerwise, columns), LEGEND])


def verdict(result: DemoResult) -> str:
    """One line: what agrees, or the first thing that does not."""
    failures = result.failures()
    if failures:
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        return f"The answers do not agree: {failures[0]}{more}"
    difference = max(turn.logits_difference for turn in result.turns)
    return (
        "The answers agree: logits with fetched KV are bit-identical to logits with the same KV "
        f"kept locally, and within {difference:.0e} of full recomputation "
        f"(allowed: {RECOMPUTATION_TOLERANCE:.0e}), which answers the same."
    )


def _turn_cells(turn: TurnMeasurement, paths: tuple[str, ...]) -> list[str]:
    cells = [
        str(turn.turn),
        f"{turn.prompt_tokens:,}",
        f"{turn.hit_tokens / turn.prompt_tokens:.0%}",
        _mib(turn.fetched_bytes),
        _ms(turn.recompute_ttft_s),
    ]
    reuses = [turn.reuse(path, delivery) for path in paths for delivery in DELIVERIES]
    return cells + ["-" if reuse is None else _ms(reuse.ttft_s) for reuse in reuses]


def _mib(length_bytes: int) -> str:
    return f"{length_bytes / (1 << 20):.1f}"


def _ms(duration_s: float) -> str:
    return f"{duration_s * 1e3:,.0f}"
