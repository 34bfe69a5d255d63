"""The commands. Each imports what it runs, so that `objectcache --help` stays quick."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core
import typer.main

from objectcache_operations.console.failing import fail
from objectcache_operations.console.settings_flags import (
    Assignments,
    Config,
    DataDir,
    find_settings,
)
from objectcache_operations.supervisor import processes

if TYPE_CHECKING:
    from objectcache_runtime.settings import Settings

ADMIN = "admin"


class LazyCommands(typer.core.TyperGroup):
    """Declares the operator's commands, of which there are many, only where they are asked for."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _admin_group() if cmd_name == ADMIN else super().get_command(ctx, cmd_name)


@functools.cache
def _admin_group() -> typer.core.TyperGroup:
    from objectcache_operations.admin.app import admin_app

    group = typer.main.get_group(admin_app)
    group.name = ADMIN
    return group


app = typer.Typer(
    cls=LazyCommands,
    help="S3-compatible object store for LLM prefix KV cache, delivered layer by layer.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # its tracebacks show locals, and locals may hold secrets
)
bench_app = typer.Typer(help="Measure a running server.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")
gpu_app = typer.Typer(help="Copies to the GPUs of this machine.", no_args_is_help=True)
app.add_typer(gpu_app, name="gpu")
app.add_typer(typer.Typer(), name=ADMIN)  # in its place stands what `LazyCommands` declares

CaFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="PEM, whom to trust at an https endpoint. Default: $AWS_CA_BUNDLE."
    ),
]

# These programs parse their own flags and print their own help.
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"objectcache {importlib.metadata.version(processes.DISTRIBUTION)}")
        raise typer.Exit


@app.callback()
def _objectcache(  # pyright: ignore[reportUnusedFunction] - typer calls it
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="And exit.")
    ] = False,
) -> None:
    pass


@app.command("create-store")
def create_store(
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL", help="As storage.engine names it.", envvar="OBJECTCACHE_STORAGE_ENGINE"
        ),
    ],
) -> None:
    """Make the store that several storage servers share, once, before the first is started.

    What the URL names must be there: the bucket, the pool, the mounted file system, the folder in
    which the store's own is made. Where there is a store already nothing is made, and the command
    exits 1.
    """
    _need_extras("create-store", processes.STORAGE_EXTRA)
    processes.replace_process(f"{processes.STORAGE_MODULE}.create_store", [url])


@app.command()
def serve(
    data_dir: DataDir = None,
    listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Default 127.0.0.1:9000; port 0 picks a free one."),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|URL",
            help="local (default), files, memory, or a store that servers share: rados://POOL, "
            "s3://BUCKET, daos://POOL/CONTAINER, file:///FOLDER (`objectcache create-store`).",
        ),
    ] = None,
    config: Config = None,
    assignments: Assignments = None,
) -> None:
    """Start a storage server, its gateways and the admin server, and keep them running.

    SIGHUP replaces the gateways one after the other. Every setting: `objectcache settings`.
    """
    _need_extras("serve", processes.GATEWAY_EXTRA, processes.STORAGE_EXTRA)
    assigned = list(assignments or [])
    if listen is not None:
        assigned.append(f"gateway.listen={listen}")
    if engine is not None:
        assigned.append(f"storage.engine={engine}")
    settings = _load_settings(config, data_dir, assigned)
    raise typer.Exit(_supervise(settings, processes.server_arguments(config, data_dir, assigned)))


@app.command(context_settings=PASSED_ON)
def gateway(context: typer.Context) -> None:
    """Start a gateway alone; --help shows its flags."""
    _need_extras("gateway", processes.GATEWAY_EXTRA)
    processes.replace_process(processes.GATEWAY_MODULE, context.args)


@app.command(context_settings=PASSED_ON)
def dispatch(context: typer.Context) -> None:
    """Say over HTTP who serves a request, and over which storage NIC; --help shows its flags."""
    _need_extras("dispatch", processes.GATEWAY_EXTRA)
    processes.replace_process(processes.DISPATCH_MODULE, context.args)


@app.command(context_settings=PASSED_ON)
def storage(context: typer.Context) -> None:
    """Start a storage server alone; --help shows its flags."""
    _need_extras("storage", processes.STORAGE_EXTRA)
    processes.replace_process(processes.STORAGE_MODULE, context.args)


@app.command(context_settings=PASSED_ON)
def relay(context: typer.Context) -> None:
    """Start a relay, which takes deliveries in over this node's NIC; --help shows its flags."""
    _need_extras("relay", processes.GATEWAY_EXTRA, processes.STORAGE_EXTRA)
    processes.replace_process(processes.RELAY_MODULE, context.args)


@app.command(context_settings=PASSED_ON)
def fetcher(context: typer.Context) -> None:
    """Start a fetcher, which decodes for this host's engines; --help shows its flags."""
    _need_extras("fetcher", processes.GATEWAY_EXTRA, processes.STORAGE_EXTRA)
    processes.replace_process(processes.FETCHER_MODULE, context.args)


@app.command(context_settings=PASSED_ON)
def demo(context: typer.Context) -> None:
    """Prefill, store and reuse a prefix layer by layer, and compare the answers."""
    _need_extras("demo", processes.GATEWAY_EXTRA, processes.STORAGE_EXTRA)
    from objectcache_laboratory import demo as demonstration

    raise typer.Exit(demonstration.main(context.args))


@app.command(context_settings=PASSED_ON)
def schedule(context: typer.Context) -> None:
    """Predict rates, TTFT and stalls of requests that share a link; --help shows its flags."""
    _need_extras("schedule", processes.STORAGE_EXTRA)
    processes.replace_process(f"{processes.STORAGE_MODULE}.what_if", context.args)


@app.command()
def calibrate(
    data_dir: DataDir = None,
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="Default: $OBJECTCACHE_ENDPOINT.")
    ] = None,
    credentials_file: Annotated[
        Path | None,
        typer.Option(
            "--credentials",
            "--credentials-file",
            metavar="FILE",
            help="Default: DATA_DIR/root-credentials, or $OBJECTCACHE_ACCESS_KEY and "
            "$OBJECTCACHE_SECRET_KEY.",
        ),
    ] = None,
    ca_file: CaFile = None,
    geometry: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=BYTES_PER_LAYER,WINDOW,LAYERS",
            help="What is delivered, such as 16K=56MiB,8.8ms,32; may be repeated. Default: four "
            "of the paper's table A8.",
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Geometries by the rows of a compute profile."),
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            max=4096.0,
            metavar="F",
            help="Divides the bytes, not the times. Default: 1, and 32 for the paper's.",
        ),
    ] = None,
    repeats: Annotated[
        int, typer.Option(min=1, max=100, metavar="N", help="Deliveries at each rate.")
    ] = 2,
    transport: Annotated[
        str, typer.Option(help="How deliveries arrive: auto, shared_memory or body.")
    ] = "auto",
    apply: Annotated[
        bool, typer.Option("--apply", help="Write what is proposed; needs --data-dir.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the curves there, too.")
    ] = None,
    config: Config = None,
    assignments: Assignments = None,
) -> None:
    """Measure TTFT by rate on a running server, and propose a margin and a mode threshold.

    Deliveries go one at a time, from a bucket of their own that is deleted at the end.
    """
    from rich.console import Console

    from objectcache_laboratory.access import find_access
    from objectcache_operations.console import calibrate as calibration
    from objectcache_schemas.errors import InvalidRequest, ObjectCacheError

    try:
        options = calibration.CalibrateOptions(
            geometries=calibration.geometries_of(list(geometry or ()), profile),
            scale=calibration.scale_of(scale, bool(geometry) or profile is not None),
            repeats=repeats,
            transport=transport,
            apply=apply,
            as_json=as_json,
            svg=svg,
            settings=calibration.settings_of(config, data_dir, assignments, apply),
        )
        credentials = credentials_file or calibration.default_credentials(data_dir)
        access = find_access(endpoint, credentials, os.environ, ca_file)
        calibration.run(options, access, Console())
    except InvalidRequest as error:
        fail(error.message)
    except ObjectCacheError as error:
        fail(f"{error.code}: {error.message}", exit_code=1)


@gpu_app.command("check")
def gpu_check(
    size_mib: Annotated[
        int, typer.Option("--mib", min=1, max=4096, metavar="N", help="So much in each copy.")
    ] = 256,
) -> None:
    """Verify bytes over every way, layout and link, beside one copy's rate; what is on and off.

    Exits with 1 where there is no GPU, or a byte was wrong. Needs NVIDIA's driver and CUDA 12 or
    later, such as torch brings. Its authors have not run it on a GPU.
    """
    from rich.console import Console

    from objectcache_operations.console import gpu_check as checking
    from objectcache_schemas.errors import Unavailable
    from objectcache_schemas.limits import MIB

    try:
        is_right = checking.report(checking.devices_here(), size_mib * MIB, Console())
    except Unavailable as error:
        fail(f"GPUs cannot be checked here: {error.message}", exit_code=1)
    if not is_right:
        fail("bytes were wrong: do not copy to these GPUs by what is marked", exit_code=1)


@gpu_app.command("calibrate")
def gpu_calibrate(
    device: Annotated[int, typer.Option(min=0, metavar="N", help="The GPU's number.")] = 0,
    write: Annotated[
        Path | None, typer.Option("--write", metavar="FILE", help="What is best, as JSON.")
    ] = None,
    piece_kib: Annotated[
        int, typer.Option(min=1, max=16384, metavar="N", help="So long are the pieces.")
    ] = 32,
    size_mib: Annotated[
        int, typer.Option("--mib", min=1, max=4096, metavar="N", help="So much in each copy.")
    ] = 256,
) -> None:
    """Measure which way, micro-task and depth copies scattered pieces fastest, and several links.

    Exits with 1 where there is no GPU. Nothing else should use it meanwhile. Its authors have not
    run it on a GPU.
    """
    from rich.console import Console

    from objectcache_operations.console import gpu_calibrate as calibrating
    from objectcache_operations.console.gpu_check import devices_here
    from objectcache_schemas.errors import InvalidRequest, Unavailable
    from objectcache_schemas.limits import KIB, MIB

    try:
        here = devices_here()
        if device >= len(here):
            fail(f"The GPU cannot be measured here: there is no GPU {device}", exit_code=1)
        own = here.pop(device)
        size_bytes, piece_bytes = size_mib * MIB, piece_kib * KIB
        calibrating.calibrate(own, size_bytes, piece_bytes, write, Console(), here)
    except InvalidRequest as error:
        fail(error.message)
    except Unavailable as error:
        fail(f"The GPU cannot be measured here: {error.message}", exit_code=1)


@app.command("pd-ratio")
def pd_ratio(
    gpus: Annotated[int, typer.Option(metavar="N", help="Of a node, each with a compute NIC.")] = 8,
    snic_gbps: Annotated[
        float, typer.Option(metavar="GBPS", help="A node's storage NIC, 10^9 bits a second.")
    ] = 400.0,
    cnic_gbps: Annotated[float, typer.Option(metavar="GBPS", help="A GPU's compute NIC.")] = 400.0,
    memory_gbytes_s: Annotated[
        float | None,
        typer.Option(
            metavar="GB/S", help="A node's memory, reads and writes. Default: bounds nothing."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Say which ratios of prefill to decode nodes keep storage NICs busy, and what binds."""
    from objectcache_operations.console import ratio_advice
    from objectcache_schemas.errors import InvalidRequest

    try:
        advice = ratio_advice.advise(gpus, snic_gbps, cnic_gbps, memory_gbytes_s)
    except InvalidRequest as error:
        fail(error.message)
    typer.echo(ratio_advice.as_json(advice) if as_json else ratio_advice.as_text(advice))


@app.command(context_settings=PASSED_ON)
def simulate(context: typer.Context) -> None:
    """Simulate many clients under each policy and load; --help shows its flags."""
    _need_extras("simulate", processes.STORAGE_EXTRA)
    processes.replace_process(f"{processes.STORAGE_MODULE}.simulation", context.args)


@app.command("simulate-cluster")
def simulate_cluster(
    nodes: Annotated[
        str, typer.Option(metavar="nPmD", help="Nodes for prefill and decode, such as 2P4D.")
    ] = "2P4D",
    model: Annotated[
        str,
        typer.Option(metavar="NAME", help="Such as ds660b, ds27b, qwen32b, gptoss120b."),
    ] = "ds660b",
    trace: Annotated[
        str,
        typer.Option(
            metavar="NAME|PATH",
            help="32K, 48K or 64K, generated; a Mooncake trace (.jsonl), an agentic trajectory "
            "(.json) or a folder of those.",
        ),
    ] = "64K",
    agents: Annotated[int, typer.Option(metavar="N", help="At once; with --aps, in all.")] = 256,
    aps: Annotated[
        float | None, typer.Option(metavar="RATE", help="Agents that arrive a second, Poisson.")
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="With --aps: ends there; its second half is what is measured."
        ),
    ] = None,
    routes: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="single, single_scheduled, round_robin, paper, least_lateness, split, any_node, "
            "split_any_node, oracle.",
        ),
    ] = "single,paper,any_node",
    all_routes: Annotated[
        bool, typer.Option("--all", help="The paper's ablation, ours and the Oracle.")
    ] = False,
    reads: Annotated[str, typer.Option(help="layerwise or whole: before a prefill begins.")] = (
        "layerwise"
    ),
    order: Annotated[str, typer.Option(help="Of a storage NIC: first_come or due_time.")] = (
        "first_come"
    ),
    gpus: Annotated[int, typer.Option(metavar="N", help="Of a node, each with a compute NIC.")] = 8,
    snic_gbps: Annotated[float, typer.Option(metavar="GBPS", help="A node's storage NIC.")] = 400.0,
    cnic_gbps: Annotated[float, typer.Option(metavar="GBPS", help="A GPU's compute NIC.")] = 400.0,
    memory_gbytes_s: Annotated[float, typer.Option(metavar="GB/S", help="A node's.")] = 500.0,
    prefill_tflops: Annotated[
        float | None, typer.Option(metavar="TFLOPS", help="Of a GPU. Default: the model's, fitted.")
    ] = None,
    append_scale: Annotated[
        float, typer.Option(metavar="F", help="Times each turn's appended tokens.")
    ] = 1.0,
    generate_scale: Annotated[
        float, typer.Option(metavar="F", help="Times each turn's generated tokens.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same events.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all measures there, too.")
    ] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="As CSV.")] = None,
    svg_file: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="Bars of completion times.")
    ] = None,
) -> None:
    """Simulate prefill and decode nodes and their NICs under each way of choosing routes.

    Virtual time and the dispatch library's own code; no server, no GPU.
    """
    from rich.console import Console

    from objectcache_operations.console import cluster_runs
    from objectcache_schemas.errors import InvalidRequest

    flags = cluster_runs.ClusterFlags(
        nodes=nodes,
        model=model,
        trace=trace,
        agents=agents,
        aps=aps,
        duration_s=duration,
        routes=",".join(cluster_runs.ALL) if all_routes else routes,
        reads=reads,
        order=order,
        gpus=gpus,
        snic_gbps=snic_gbps,
        cnic_gbps=cnic_gbps,
        memory_gbytes_s=memory_gbytes_s,
        prefill_tflops=prefill_tflops,
        append_scale=append_scale,
        generate_scale=generate_scale,
        seed=seed,
        json_file=json_file,
        csv_file=csv_file,
        svg_file=svg_file,
    )
    try:
        cluster_runs.run(flags, Console())
    except InvalidRequest as error:
        fail(error.message)


@app.command()
def settings() -> None:
    """Print every setting, its environment variable, default and meaning, as Markdown."""
    from objectcache_operations.console.settings_table import settings_document

    typer.echo(settings_document(), nl=False)


@bench_app.callback()
def _bench() -> None:  # pyright: ignore[reportUnusedFunction] - makes `replay` a command of its own
    pass


@bench_app.command()
def replay(
    trace: Annotated[Path, typer.Option(metavar="FILE", help="Mooncake trace, JSON lines.")],
    requests: Annotated[
        int, typer.Option(min=1, metavar="N", help="How many of its requests, from the first.")
    ] = 100,
    scale: Annotated[
        float,
        typer.Option(
            min=1e-6,
            metavar="F",
            help="Size of a block: 1.0 is Llama 3.1 8B, 4096 bytes a token and layer, "
            "64 MiB a block of 512 tokens; the default is 328 KiB.",
        ),
    ] = 0.005,
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="Default: $OBJECTCACHE_ENDPOINT.")
    ] = None,
    credentials_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Such as DATA_DIR/root-credentials. Default: $OBJECTCACHE_ACCESS_KEY and "
            "$OBJECTCACHE_SECRET_KEY.",
        ),
    ] = None,
    ca_file: CaFile = None,
    concurrency: Annotated[
        int, typer.Option(min=1, max=256, metavar="C", help="Requests in flight.")
    ] = 4,
    layers: Annotated[int, typer.Option(min=1, metavar="L", help="Layers of a block.")] = 32,
    block_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens that one hash id of the trace stands for.")
    ] = 512,
    speed: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="X",
            help="0: as fast as possible. Else requests arrive as in the trace, X times as fast.",
        ),
    ] = 0.0,
    seed: Annotated[
        int, typer.Option(help="Another seed is another set of keys: it starts without hits.")
    ] = 0,
    transport: Annotated[
        str, typer.Option(help="How deliveries arrive: auto, shared_memory or body.")
    ] = "auto",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the report there, too.")
    ] = None,
) -> None:
    """Replay a request trace: match, fetch layer by layer, check every byte, put the rest.

    Exits 1 if a byte was wrong or a request failed.
    """
    from rich.console import Console

    from objectcache_laboratory.access import find_access
    from objectcache_operations.console import bench_replay
    from objectcache_schemas.errors import InvalidRequest, ObjectCacheError

    options = bench_replay.ReplayOptions(
        trace=trace,
        requests_max=requests,
        scale=scale,
        concurrency=concurrency,
        layers=layers,
        block_tokens=block_tokens,
        speed=speed,
        seed=seed,
        transport=transport,
        json_file=json_file,
    )
    try:
        access = find_access(endpoint, credentials_file, os.environ, ca_file)
        exit_code = bench_replay.run(options, access, Console())
    except InvalidRequest as error:
        fail(error.message)
    except ObjectCacheError as error:
        fail(f"{error.code}: {error.message}", exit_code=1)
    raise typer.Exit(exit_code)


def _need_extras(command: str, *extras: str) -> None:
    missing = processes.missing_distributions(extras)
    if missing:
        fail(
            f"`objectcache {command}` needs packages that are not installed: "
            f'{", ".join(missing)}. Install them with: pip install "objectcache[server]"'
        )


def _load_settings(config: str | None, data_dir: str | None, assignments: list[str]) -> Settings:
    """The settings that the servers will find, checked before any of them is started."""
    from objectcache_runtime.settings import SECTIONS, check_paths
    from objectcache_schemas.errors import InvalidRequest

    try:
        settings = find_settings(config, data_dir, assignments)
        _ = settings.data_dir
        check_paths(settings, *SECTIONS)
    except InvalidRequest as error:
        fail(error.message)
    return settings


def _supervise(settings: Settings, arguments: tuple[str, ...]) -> int:
    import asyncio

    from objectcache_operations.supervisor import listeners, supervise
    from objectcache_schemas.errors import InvalidRequest, ObjectCacheError

    try:
        served = listeners.find(settings, os.environ)
    except InvalidRequest as error:
        fail(error.message)
    except ObjectCacheError as error:
        fail(error.message, exit_code=1)

    def announce(admin_url: str | None) -> None:
        typer.echo(supervise.announcement(served.url, admin_url, settings.data_dir, os.environ))
        sys.stdout.flush()

    commands = supervise.Commands(
        supervise.storage_child(settings, arguments),
        supervise.gateway_children(settings, arguments, served.descriptors),
        supervise.admin_child(settings, arguments),
    )
    return asyncio.run(supervise.supervise(commands, announce))
