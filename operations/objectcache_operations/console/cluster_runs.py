"""`objectcache simulate-cluster`: from flags to runs of the cluster simulator, and files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console

from objectcache_dispatch import Topology, symmetric
from objectcache_laboratory.cluster.links import NICS, ReadOrder
from objectcache_laboratory.cluster.measures import ClusterMeasures
from objectcache_laboratory.cluster.models import MODELS, ModelCosts
from objectcache_laboratory.cluster.placement import PLACINGS
from objectcache_laboratory.cluster.report import as_csv, as_json, as_svg, report_table
from objectcache_laboratory.cluster.run import ClusterOptions, Reads, simulate
from objectcache_laboratory.cluster.trace_files import read_trajectories
from objectcache_laboratory.cluster.trajectories import TRACES, Trajectory, replayed
from objectcache_schemas.errors import InvalidRequest

ORACLE = "oracle"
ALL = ("single", "round_robin", "paper", "any_node", "split_any_node", ORACLE)
NODES_MAX = 4096  # of a cluster: a decision scans them all
AGENTS_MAX = 1_000_000
WHOLE_CELLS = 400  # more than a table has: what goes into a pipe or a file is not cut


@dataclass(frozen=True, slots=True)
class ClusterFlags:
    """The flags of one command, as they were given."""

    nodes: str
    model: str
    trace: str
    agents: int
    aps: float | None
    duration_s: float | None
    routes: str
    reads: str
    order: str
    gpus: int
    snic_gbps: float
    cnic_gbps: float
    memory_gbytes_s: float
    prefill_tflops: float | None
    append_scale: float
    generate_scale: float
    seed: int
    json_file: Path | None
    csv_file: Path | None
    svg_file: Path | None


def run(flags: ClusterFlags, console: Console) -> None:
    """Simulate, print the table, write the files.

    Raises `InvalidRequest` naming the flag, before anything is simulated.
    """
    model = _model(flags)
    topology = _topology(flags, model)
    names = _routes(flags.routes)
    _check_figures(flags)
    for flag, file in _files(flags):
        _check_writable(flag, file)
    options = _options(flags)
    trajectories = _trajectories(flags, model)
    title = f"{flags.nodes}, {model.title}, trace {flags.trace}, {len(trajectories):,} agents"
    runs = list[ClusterMeasures]()
    for name in names:
        with console.status(f"simulating {name}"):
            runs.append(_simulate(topology, model, trajectories, options, name))
    if not console.is_terminal:
        console.width = WHOLE_CELLS
    console.print(report_table(runs, title))
    written: dict[str, Callable[[], bytes]] = {
        "--json": lambda: as_json(runs, _as_given(flags)),
        "--csv": lambda: as_csv(runs).encode(),
        "--svg": lambda: as_svg(runs, title).encode(),
    }
    for flag, file in _files(flags):
        file.write_bytes(written[flag]())


def _simulate(
    topology: Topology,
    model: ModelCosts,
    trajectories: Sequence[Trajectory],
    options: ClusterOptions,
    name: str,
) -> ClusterMeasures:
    if name == ORACLE:
        oracle = replace(options, routes="paper", is_oracle=True)
        return replace(simulate(topology, model, trajectories, oracle), routes=ORACLE)
    return simulate(topology, model, trajectories, replace(options, routes=name))


def _model(flags: ClusterFlags) -> ModelCosts:
    if flags.model not in MODELS:
        raise InvalidRequest(f"--model {flags.model!r} is not known; one of {', '.join(MODELS)}")
    model = MODELS[flags.model]
    if flags.prefill_tflops is None:
        return model
    _check_positive("--prefill-tflops", flags.prefill_tflops)
    return replace(model, prefill_flop_per_s=flags.prefill_tflops * 1e12)


def _topology(flags: ClusterFlags, model: ModelCosts) -> Topology:
    found = re.fullmatch(r"([0-9]{1,6})P([0-9]{1,6})D", flags.nodes, re.ASCII | re.IGNORECASE)
    counts = (0, 0) if found is None else (int(found[1]), int(found[2]))
    if min(counts) < 1 or sum(counts) > NODES_MAX:
        raise InvalidRequest(
            f"--nodes {flags.nodes!r} must be such as 2P4D: nodes for prefill and for decode, at "
            f"least one of each and at most {NODES_MAX} together"
        )
    if not 1 <= flags.gpus <= 64:
        raise InvalidRequest(f"--gpus is {flags.gpus}; from 1 to 64")
    for flag, figure in (
        ("--snic-gbps", flags.snic_gbps),
        ("--cnic-gbps", flags.cnic_gbps),
        ("--memory-gbytes-s", flags.memory_gbytes_s),
    ):
        _check_positive(flag, figure)
    return symmetric(
        *counts,
        gpus=flags.gpus,
        storage_nic_bytes_per_s=flags.snic_gbps * 1e9 / 8,
        compute_nic_bytes_per_s=flags.cnic_gbps * 1e9 / 8,
        memory_bytes_per_s=flags.memory_gbytes_s * 1e9,
        kv_capacity_tokens=model.kv_capacity_tokens,
    )


def _routes(named: str) -> list[str]:
    names = [name.strip() for name in named.split(",")]
    for name in names:
        if name not in PLACINGS and name != ORACLE:
            known = ", ".join([*PLACINGS, ORACLE])
            raise InvalidRequest(f"--routes {name!r} are not known; of {known}")
    return names


def _check_figures(flags: ClusterFlags) -> None:
    if not 1 <= flags.agents <= AGENTS_MAX:
        raise InvalidRequest(f"--agents is {flags.agents}; from 1 to {AGENTS_MAX}")
    for flag, figure in (
        ("--aps", flags.aps),
        ("--duration", flags.duration_s),
        ("--append-scale", flags.append_scale),
        ("--generate-scale", flags.generate_scale),
    ):
        if figure is not None:
            _check_positive(flag, figure)
    if flags.duration_s is not None and flags.aps is None:
        raise InvalidRequest("--duration is of use with --aps alone; agents at once run to the end")
    if flags.seed < 0:
        raise InvalidRequest(f"--seed is {flags.seed}; at least 0")


def _options(flags: ClusterFlags) -> ClusterOptions:
    reads: dict[str, Reads] = {"layerwise": "layerwise", "whole": "whole"}
    orders: dict[str, ReadOrder] = {str(order): order for order in NICS}
    if flags.reads not in reads:
        raise InvalidRequest(f"--reads is {flags.reads!r}; one of {', '.join(reads)}")
    if flags.order not in orders:
        raise InvalidRequest(f"--order is {flags.order!r}; one of {', '.join(orders)}")
    until_s = float("inf") if flags.duration_s is None else flags.duration_s
    return ClusterOptions(
        reads=reads[flags.reads],
        order=orders[flags.order],
        arrivals_per_s=flags.aps,
        warm_s=0.0 if flags.duration_s is None else flags.duration_s / 2,
        until_s=until_s,
        seed=flags.seed,
    )


def _trajectories(flags: ClusterFlags, model: ModelCosts) -> list[Trajectory]:
    shape = TRACES.get(flags.trace.upper())
    if shape is not None:
        found = replayed(shape, flags.agents, flags.seed)
        tokens_max = shape.tokens_max
    else:
        path = Path(flags.trace)
        if not path.exists():
            raise InvalidRequest(
                f"--trace {flags.trace!r} is none of {', '.join(TRACES)}, and no file or folder"
            )
        try:
            found = read_trajectories(path, flags.agents)
        except InvalidRequest as error:
            raise InvalidRequest(f"--trace: {error.message}") from error
        tokens_max = max(each.total_tokens for each in found)
        found = [found[agent % len(found)] for agent in range(flags.agents)]
    if (flags.append_scale, flags.generate_scale) != (1.0, 1.0):
        scales = (flags.append_scale, flags.generate_scale)
        found = [each.scaled(*scales, tokens_max) for each in found]
    longest = max(int(each.turns.sum(axis=1).max()) for each in found)
    if longest > model.kv_capacity_tokens:
        raise InvalidRequest(
            f"--trace {flags.trace}: a turn has {longest} tokens; a decode GPU holds "
            f"{model.kv_capacity_tokens} of --model {model.name}"
        )
    return found


def _files(flags: ClusterFlags) -> list[tuple[str, Path]]:
    named = (("--json", flags.json_file), ("--csv", flags.csv_file), ("--svg", flags.svg_file))
    return [(flag, file) for flag, file in named if file is not None]


def _check_writable(flag: str, file: Path) -> None:
    if file.is_dir() or not file.parent.is_dir():
        raise InvalidRequest(f"{flag} {file}: it is a directory, or its directory is not there")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise InvalidRequest(f"{flag} {file}: it may not be written")


def _check_positive(flag: str, figure: float) -> None:
    if not 0 < figure < float("inf"):
        raise InvalidRequest(f"{flag} is {figure}; it must be finite and above 0")


def _as_given(flags: ClusterFlags) -> dict[str, object]:
    given = asdict(flags)
    return {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
