"""`python -m objectcache_storage_server.simulation`: what `objectcache simulate` runs."""

from __future__ import annotations

import argparse
import math
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn, get_args

from rich.console import Console

from objectcache_runtime.settings import Settings
from objectcache_runtime.usable_paths import FileUse, check_path
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import CAP_GBPS_MAX, CAP_GBPS_MIN
from objectcache_schemas.operators.schedule import TenantShare
from objectcache_schemas.policy_names import EVERY_EPOCH, RATES, PolicyName
from objectcache_storage_server.admission.delivery_turns import AdmissionLimits
from objectcache_storage_server.scheduling.scheduler import BYTES_PER_GBIT
from objectcache_storage_server.simulation.arrivals import (
    Arrival,
    among_tenants,
    with_chunkwise,
    with_window_errors,
    without_windows,
)
from objectcache_storage_server.simulation.machine import Machine
from objectcache_storage_server.simulation.measures import Measures
from objectcache_storage_server.simulation.mix import Mix, poisson_arrivals, rate_for, read_mix
from objectcache_storage_server.simulation.mooncake import REQUESTS_MAX, trace_arrivals
from objectcache_storage_server.simulation.plot import check_plot, draw
from objectcache_storage_server.simulation.report import as_csv, as_json, table
from objectcache_storage_server.simulation.run import SimulatedSchedule
from objectcache_storage_server.simulation.side_by_side import ComparedRun, measured
from objectcache_storage_server.simulation.tenant_shares import read_shares

PROGRAM = "objectcache simulate"
DESCRIPTION = """\
Simulate many clients on one storage server under virtual time: how much longer their first tokens
take than alone, by policy and load. Requests come from a trace in Mooncake's format, or at random
from a mix (Llama 3.1 8B: 32 layers, 4,096 bytes a token and layer). Every request has a GPU.
"""
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
REQUESTS = 1000
UTILISATION = 0.7  # of the link by bytes, by the default rate
WINDOW_ERROR_MAX = 100.0
LOAD_MAX = 1000.0
LOADS_MAX = 32
TENANTS_MAX = 100_000
PIPED_COLUMNS = 200
INTERRUPTED = 130  # what shells say of SIGINT


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Without the usage before it: one line says what is wrong."""
        raise InvalidRequest(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        PROGRAM,
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_requests(parser)
    _add_server(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="for programs")
    output.add_argument("--csv", type=Path, metavar="FILE", help="write the figures there, too")
    output.add_argument("--plot", type=Path, metavar="FILE.svg|png", help="draw them")
    return parser


def _add_requests(parser: argparse.ArgumentParser) -> None:
    requests = parser.add_argument_group("requests")
    requests.add_argument("--trace", type=Path, metavar="FILE", help="JSON lines, as Mooncake's")
    requests.add_argument(
        "--requests",
        type=int,
        metavar="N",
        help=f"how many, from the first; default {REQUESTS}, of a trace all",
    )
    requests.add_argument(
        "--rate",
        type=float,
        metavar="R",
        help=f"a second, at random; default: what uses {UTILISATION:.0%}% of the link",
    )
    requests.add_argument(
        "--mix",
        type=Path,
        metavar="FILE.csv",
        help="compute profile, which has the columns of the paper's table A8; default that table",
    )
    requests.add_argument(
        "--load",
        default="x1",
        metavar="x0.5,x1,...",
        help="the same requests so many times as fast; default x1",
    )
    requests.add_argument(
        "--tenants", type=int, metavar="N", help="spread over so many, by Zipf's law"
    )
    requests.add_argument(
        "--chunkwise",
        type=float,
        default=0.0,
        metavar="PART",
        help="of the requests, from 0 to 1: delivered chunkwise, outside of the pool; default 0",
    )
    requests.add_argument(
        "--windowless",
        type=float,
        default=0.0,
        metavar="PART",
        help="of the requests, from 0 to 1: the scheduler is told no compute window; default 0",
    )
    requests.add_argument(
        "--window-error",
        type=float,
        default=1.0,
        metavar="F",
        help="the scheduler is told windows that are wrong by a factor from 1/F to F; default 1",
    )
    requests.add_argument("--seed", type=int, default=0, metavar="S", help="of all chance; 0")


def _add_server(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("server")
    policy = server.add_mutually_exclusive_group()
    policy.add_argument("--policy", choices=POLICIES, metavar="P", help=", ".join(POLICIES))
    policy.add_argument("--all", action="store_true", help="compare all policies; the default")
    server.add_argument(
        "--rates",
        choices=RATES,
        default=EVERY_EPOCH,
        metavar="HOLD",
        help="how long an assigned rate holds: every_epoch, for_life; default every_epoch",
    )
    server.add_argument("--cap-gbps", type=float, required=True, metavar="B", help="of the link")
    server.add_argument("--margin-gbps", type=float, default=5.0, metavar="M", help="default 5")
    server.add_argument("--nic-gbps", type=float, metavar="B", help="default: no limit")
    server.add_argument("--engine-gbps", type=float, metavar="B", help="default: no limit")
    server.add_argument(
        "--engine-latency-ms", type=float, default=0.0, metavar="T", help="of each read; default 0"
    )
    server.add_argument(
        "--deliveries-max", type=int, metavar="N", help="at once; default as storage.deliveries_max"
    )
    server.add_argument(
        "--feedback",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="GPUs tell which layers they are through with; default yes",
    )
    server.add_argument(
        "--tenant",
        action="append",
        default=[],
        metavar="N=WEIGHT[:CAP_GBPS]",
        help="share of the tenant with the Nth most requests; may be repeated",
    )


def _check(flag: str, value: float | None, least: float, most: float) -> None:
    if value is not None and not least <= value <= most:
        raise InvalidRequest(f"{flag} must be from {least:g} to {most:g}, got {value:g}")


def _check_flags(flags: argparse.Namespace) -> None:
    for flag, value in (
        ("--cap-gbps", flags.cap_gbps),
        ("--nic-gbps", flags.nic_gbps),
        ("--engine-gbps", flags.engine_gbps),
    ):
        _check(flag, value, CAP_GBPS_MIN, CAP_GBPS_MAX)
    _check("--margin-gbps", flags.margin_gbps, 0, CAP_GBPS_MAX)
    _check("--engine-latency-ms", flags.engine_latency_ms, 0, 1000)
    _check("--requests", flags.requests, 1, REQUESTS_MAX)
    _check("--rate", flags.rate, 1e-3, 1e5)
    _check("--tenants", flags.tenants, 1, TENANTS_MAX)
    _check("--chunkwise", flags.chunkwise, 0, 1)
    _check("--windowless", flags.windowless, 0, 1)
    _check("--window-error", flags.window_error, 1, WINDOW_ERROR_MAX)
    _check("--deliveries-max", flags.deliveries_max, 1, 1_000_000)
    if flags.trace is not None and flags.rate is not None:
        raise InvalidRequest(
            "--rate is of requests at random; a trace has its own times: use --load"
        )
    if flags.plot is not None:
        check_plot(flags.plot)
        check_path("--plot", str(flags.plot), FileUse.APPENDED_FILE)
    if flags.csv is not None:
        check_path("--csv", str(flags.csv), FileUse.APPENDED_FILE)


def _loads(text: str) -> list[float]:
    parts = text.split(",")
    if len(parts) > LOADS_MAX:
        raise InvalidRequest(f"--load has {len(parts)} parts, at most {LOADS_MAX} are allowed")
    return [_load(part.strip()) for part in parts]


def _load(text: str) -> float:
    try:
        load = float(text.removeprefix("x"))
    except ValueError:
        load = math.nan
    if not 1 / LOAD_MAX <= load <= LOAD_MAX:
        raise InvalidRequest(
            f"--load must be like x0.5,x1,x2, each from {1 / LOAD_MAX:g} to {LOAD_MAX:g}, "
            f"got {text!r}"
        )
    return load


def _arrivals(flags: argparse.Namespace, machine: Machine) -> list[Arrival]:
    mix = read_mix(flags.mix)
    if flags.trace is not None:
        arrivals = trace_arrivals(flags.trace, mix.profile, flags.requests or REQUESTS_MAX)
    else:
        flags.rate = flags.rate or _default_rate(mix, machine)
        arrivals = poisson_arrivals(mix, flags.requests or REQUESTS, flags.rate, flags.seed)
    return _varied(arrivals, flags)


def _default_rate(mix: Mix, machine: Machine) -> float:
    return rate_for(mix, UTILISATION, machine.alone_bytes_per_s / machine.token_bytes)


def _varied(arrivals: list[Arrival], flags: argparse.Namespace) -> list[Arrival]:
    if flags.tenants:
        arrivals = among_tenants(arrivals, flags.tenants, flags.seed)
    if flags.window_error > 1:
        arrivals = with_window_errors(arrivals, flags.window_error, flags.seed)
    if flags.chunkwise:
        arrivals = with_chunkwise(arrivals, flags.chunkwise, flags.seed)
    if flags.windowless:
        arrivals = without_windows(arrivals, flags.windowless, flags.seed)
    return arrivals


def _machine(flags: argparse.Namespace) -> Machine:
    return Machine(
        cap_bytes_per_s=flags.cap_gbps * BYTES_PER_GBIT,
        nic_bytes_per_s=(flags.nic_gbps or math.inf) * BYTES_PER_GBIT,
        engine_bytes_per_s=(flags.engine_gbps or math.inf) * BYTES_PER_GBIT,
        engine_latency_s=flags.engine_latency_ms / 1e3,
    )


def _schedule(
    policy: PolicyName, tenants: Mapping[str, TenantShare], flags: argparse.Namespace
) -> SimulatedSchedule:
    settings = Settings()
    scheduler = settings.scheduler
    limits = AdmissionLimits(
        deliveries_max=flags.deliveries_max or settings.storage.deliveries_max,
        tenant_deliveries_max=flags.deliveries_max or scheduler.tenant_deliveries_max,
        queue_max=scheduler.queue_max,
        queue_timeout_s=scheduler.queue_timeout_s,
    )
    return SimulatedSchedule(
        policy,
        flags.margin_gbps,
        scheduler.epoch_s,
        limits,
        has_feedback=flags.feedback,
        tenants=tenants,
        rates=flags.rates,
    )


def _title(flags: argparse.Namespace, arrivals: Sequence[Arrival]) -> str:
    source = flags.trace.name if flags.trace else f"{flags.rate:.3g} requests/s"
    return f"{source}, {len(arrivals):,} deliveries, {flags.cap_gbps:g} Gbps"


def run(arguments: Sequence[str], console: Console) -> None:
    """Print what was asked. Raises `InvalidRequest` naming the flag, or the line of the file."""
    flags = _parser().parse_args(arguments)
    _check_flags(flags)
    loads, machine = _loads(flags.load), _machine(flags)
    tenants = read_shares(flags.tenant, flags.tenants)
    arrivals = _arrivals(flags, machine)
    policies = [flags.policy] if flags.policy else list(POLICIES)
    runs = [
        ComparedRun(load, _schedule(policy, tenants, flags))
        for load in loads
        for policy in policies
    ]
    begun_s = time.perf_counter()
    measures = measured(runs, arrivals, machine, tenants)
    took_s = time.perf_counter() - begun_s
    _write(measures, _title(flags, arrivals), flags, console)
    events = sum(one.events for one in measures)
    print(f"{events:,} decisions in {took_s:.1f} s, {events / took_s:,.0f}/s", file=sys.stderr)


def _write(
    measures: list[Measures], title: str, flags: argparse.Namespace, console: Console
) -> None:
    if flags.csv is not None:
        try:
            flags.csv.write_text(as_csv(measures))
        except OSError as error:
            raise InvalidRequest(f"cannot write {flags.csv}: {error.strerror}") from error
    if flags.plot is not None:
        draw(measures, title, flags.plot)
    if flags.json:
        console.file.write(as_json(measures) + "\n")
    else:
        console.print(table(measures, title))


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPED_COLUMNS)
    try:
        run(sys.argv[1:] if arguments is None else arguments, console)
    except InvalidRequest as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it quietly
    sys.exit(main())
