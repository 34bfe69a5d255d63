"""`python -m benchmarks.scale_out`: many storage servers and engines, under virtual time.

How even the gateways' own code spreads sessions and requests, how far servers' indexes are behind
the log, what commits wait, and what breaks first as servers and engines become more. Requests are
those of a trace in Mooncake's format, or made up. Times of the store and of links are given, costs
of the index are measured by `--measure`, or those that were measured before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.scale_out.figures_of_runs import Figures, described, figures_of, table
from benchmarks.scale_out.fleet_simulation import JOIN_S, FleetPlan, FleetSimulation
from benchmarks.scale_out.index_costs import GIVEN, IndexCosts, measured_costs
from benchmarks.scale_out.prefill_requests import (
    PrefillRequest,
    made_up_requests,
    trace_requests,
)

CHUNK_TOKENS = (256, 16)
ENGINES = (100, 250, 500, 1000)
SERVERS = (1, 2, 4, 8, 16)
MEASURED_RECORDS = 400  # of each size
EVENTS_S, SWEEP_S = 120.0, 20.0
QUICK_EVENTS_S, QUICK_SWEEP_S = 30.0, 10.0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; exits as argparse does."""
    parser = argparse.ArgumentParser("python -m benchmarks.scale_out", description=__doc__)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="JSON lines, as Mooncake's")
    parser.add_argument("--quick", action="store_true", help="shorter, and fewer sizes")
    parser.add_argument("--servers", type=int, default=16, metavar="N", help="default 16")
    parser.add_argument("--engines", type=int, default=1000, metavar="N", help="default 1000")
    parser.add_argument(
        "--rate", type=float, default=0.2, metavar="R", help="requests a second and engine; 0.2"
    )
    parser.add_argument(
        "--seconds", type=float, metavar="T", help=f"of the two runs with events; {EVENTS_S:g}"
    )
    parser.add_argument("--link-gbps", type=float, default=200.0, metavar="B", help="default 200")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of all chance; 0")
    parser.add_argument("--measure", action="store_true", help="the index's costs, on this machine")
    parser.add_argument("--no-sweep", action="store_true", help="the two runs with events alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    return parser.parse_args(arguments)


def requests_for(options: argparse.Namespace, plan: FleetPlan) -> list[PrefillRequest]:
    """What comes in the plan's time. Raises `InvalidRequest`."""
    rate_per_s = options.rate * plan.engines
    if options.trace is None:
        return made_up_requests(rate_per_s, plan.seconds, plan.seed)
    return trace_requests(options.trace, rate_per_s, plan.seconds)


def simulated(plan: FleetPlan, requests: Sequence[PrefillRequest]) -> Figures:
    """One run."""

    async def run() -> Figures:
        return figures_of(plan, FleetSimulation(plan, requests).run())

    return asyncio.run(run())


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, print, and write what was found; 0 whatever the figures are."""
    options = parse(arguments)
    costs = _measured() if options.measure else GIVEN
    print(costs)
    events_s = options.seconds or (QUICK_EVENTS_S if options.quick else EVENTS_S)
    whole = FleetPlan(
        servers=options.servers,
        engines=options.engines,
        chunk_tokens=CHUNK_TOKENS[0],
        seconds=events_s,
        costs=costs,
        link_gbps=options.link_gbps,
        lost_at_s=JOIN_S + events_s / 3,
        added_at_s=JOIN_S + events_s * 2 / 3,
        seed=options.seed,
    )
    runs: list[Figures] = []
    for chunk_tokens in CHUNK_TOKENS:
        plan = replace(whole, chunk_tokens=chunk_tokens)
        runs.append(simulated(plan, requests_for(options, plan)))
        print(described(runs[-1]), flush=True)
    swept = [] if options.no_sweep else _swept(options, whole)
    if swept:
        print(table(swept))
    if options.json is not None:
        content = {"costs": asdict(costs), "runs": [asdict(one) for one in (*runs, *swept)]}
        options.json.write_text(json.dumps(content, indent=1))
    return 0


def _swept(options: argparse.Namespace, whole: FleetPlan) -> list[Figures]:
    servers = SERVERS[::2] if options.quick else SERVERS
    engines = ENGINES[1::2] if options.quick else ENGINES
    seconds = QUICK_SWEEP_S if options.quick else SWEEP_S
    quiet = replace(whole, seconds=seconds, lost_at_s=None, added_at_s=None)
    plans = [
        replace(quiet, servers=server_count, engines=engine_count, chunk_tokens=chunk_tokens)
        for chunk_tokens in CHUNK_TOKENS
        for server_count in servers
        for engine_count in engines
    ]
    return [simulated(plan, requests_for(options, plan)) for plan in plans]


def _measured() -> IndexCosts:
    with tempfile.TemporaryDirectory() as folder:
        return measured_costs(Path(folder), MEASURED_RECORDS)


if __name__ == "__main__":
    sys.exit(main())
