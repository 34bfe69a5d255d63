"""`python -m benchmarks.shared_link`, in the environment of the engines.

Added TTFT of real vLLM schedulers that share one capped link, each against itself alone on that
link: under `stall_dynamic`, and under `equal`, whose rates are worked out again at every epoch, or
hold for a delivery's life as in the paper. The server is given a cap and a policy. What it knows of
the engines is what their connectors say: first they are run alone, and learn their own windows.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.basis.report import commit, machine
from benchmarks.shared_link.engine_process import BUCKET, EngineProcess, Place, engines
from benchmarks.shared_link.requests import CAP_GBPS, FULL, QUICK, SCALE
from benchmarks.shared_link.results import Results, Round, table
from objectcache_schemas.operators.schedule import ScheduleChanges, ScheduleState, SetSchedule
from objectcache_schemas.operators.traces import GetTraces, Traces
from objectcache_schemas.policy_names import EVERY_EPOCH, FOR_LIFE, PolicyName, RatesName
from tests.servers import RunningServer, start_server
from tests.storage_client import StorageClient

ALONE_LEARNING, ALONE_MEASURED = 2, 3  # runs of each engine alone, before the rounds
SOON_S = 0.2  # until all engines have heard when their requests arrive


@dataclass(frozen=True, slots=True)
class Condition:
    """What the rounds go through by turns."""

    name: str
    policy: PolicyName
    rates: RatesName = EVERY_EPOCH


DYNAMIC = Condition("stall_dynamic", "stall_dynamic")
EQUALS = (Condition("equal", "equal"), Condition("equal for life", "equal", FOR_LIFE))


class SharedLink:
    """The server, and its schedule and traces."""

    def __init__(self, server: RunningServer) -> None:
        self._socket = server.run_dir / "storage.sock"

    def take(self, condition: Condition) -> None:
        """From now on the link is shared so."""
        changes = ScheduleChanges(policy=condition.policy, rates=condition.rates, cap_gbps=CAP_GBPS)
        with StorageClient(self._socket) as storage:
            storage.ask(SetSchedule(changes=changes), ScheduleState)

    def own_windows(self, count: int) -> int:
        """Of the last so many deliveries: how many had a window that its engine told."""
        with StorageClient(self._socket) as storage:
            traces = storage.ask(GetTraces(limit=count), Traces).traces
        ours = [trace for trace in traces if trace.bucket == BUCKET]
        return sum(trace.window_source == "descriptor" for trace in ours)


def alone_s(engine: EngineProcess) -> float:
    """TTFT of an engine's request, by itself."""
    engine.begin(time.monotonic())
    return engine.ttft_s()


def together(link: SharedLink, condition: Condition, running: Sequence[EngineProcess]) -> Round:
    """All requests at the same moment."""
    link.take(condition)
    at_s = time.monotonic() + SOON_S
    for engine in running:
        engine.begin(at_s)
    ttft_s = {engine.request.name: engine.ttft_s() for engine in running}
    return Round(condition.name, ttft_s, link.own_windows(len(running)))


def measure(link: SharedLink, running: Sequence[EngineProcess], rounds: int) -> Results:
    """Each alone, then all by turns of the conditions."""
    link.take(DYNAMIC)
    alone: dict[str, float] = {}
    for engine in running:
        for _ in range(ALONE_LEARNING):
            alone_s(engine)
        alone[engine.request.name] = median(alone_s(engine) for _ in range(ALONE_MEASURED))
    run = [
        together(link, condition, running)
        for _ in range(rounds)
        for condition in (DYNAMIC, *EQUALS)
    ]
    return Results(alone, tuple(run))


def main(arguments: Sequence[str] | None = None) -> Results:
    """Measure, print a table, and write what was measured as JSON."""
    parser = argparse.ArgumentParser("python -m benchmarks.shared_link", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three short requests, a first look")
    parser.add_argument("--rounds", type=int, help="of each policy; 5, or 2 with --quick")
    parser.add_argument("--json", type=Path, help="a file for every TTFT")
    given = parser.parse_args(arguments)
    requests, layers = (QUICK, 8) if given.quick else (FULL, 32)
    rounds = given.rounds or (2 if given.quick else 5)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with start_server(directory / "data", f"scheduler.cap_gbps={CAP_GBPS}") as server:
            place = Place(server.endpoint, server.credentials_file, directory, layers)
            with engines(place, requests) as running:
                results = measure(SharedLink(server), running, rounds)
    print(f"cap {CAP_GBPS:.3f} Gbps, bytes divided by {SCALE}, {layers} layers, {rounds} rounds")
    print(table(results, DYNAMIC.name, [condition.name for condition in EQUALS]))
    if given.json is not None:
        about = {"commit": commit(), "machine": machine(), "results": asdict(results)}
        given.json.write_text(json.dumps(about, indent=1))
    return results


if __name__ == "__main__":
    main()
