"""`objectcache bench replay`: from flags to a report."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress

import objectcache
from objectcache.core import TransportChoice
from objectcache_laboratory.access import StoreAccess
from objectcache_laboratory.replay.report import ReplayReport, report_table, summarise
from objectcache_laboratory.replay.run import Replay, replay_all
from objectcache_laboratory.replay.trace import TraceRequest, read_trace
from objectcache_laboratory.replay.workload import bucket_name, first_askers, replay_layout
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.layout import KvLayout
from objectcache_schemas.limits import GIB, KIB

TARGET_BYTES_MIN = 4 * GIB  # the client's own default


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """The flags of one replay."""

    trace: Path
    requests_max: int
    scale: float
    concurrency: int
    layers: int
    block_tokens: int
    speed: float
    seed: int
    transport: str
    json_file: Path | None


def run(options: ReplayOptions, access: StoreAccess, console: Console) -> int:
    """Replay, print the report, write it as JSON; 1 where a byte was wrong or a request failed.

    Raises `ObjectCacheError` for a wrong trace and a server that cannot be reached, and before
    anything has run, for a report that could not be written.
    """
    TransportChoice.parse(options.transport)
    if options.json_file is not None:
        _check_writable(options.json_file)
    requests = read_trace(options.trace, options.requests_max, options.block_tokens)
    if not requests:
        raise InvalidRequest(f"trace {options.trace}: it holds no request")
    layout = replay_layout(options.scale, options.layers, options.block_tokens, options.seed)
    console.print(_introduction(requests, layout))
    report = _replay(options, access, requests, layout, console)
    console.print(report_table(report))
    if options.json_file is not None:
        options.json_file.write_bytes(_as_json(options, layout, report))
    return 1 if report.failed else 0


def _check_writable(file: Path) -> None:
    if file.is_dir():
        raise InvalidRequest(f"--json {file}: it is a directory")
    if not file.parent.is_dir():
        raise InvalidRequest(f"--json {file}: there is no directory {file.parent}")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise InvalidRequest(f"--json {file}: it may not be written")


def _replay(
    options: ReplayOptions,
    access: StoreAccess,
    requests: Sequence[TraceRequest],
    layout: KvLayout,
    console: Console,
) -> ReplayReport:
    blocks_max = max(len(request.hash_ids) for request in requests)
    payloads_bytes = blocks_max * layout.chunk_bytes * options.concurrency
    with (
        objectcache.Client(
            access.endpoint,
            access_key=access.access_key,
            secret_key=access.secret_key,
            transport=options.transport,
            connections_max=2 * options.concurrency,
            target_bytes_max=max(TARGET_BYTES_MIN, 2 * payloads_bytes),
            tls=access.tls(),
        ) as client,
        Progress(console=console, transient=True) as progress,
    ):
        bucket = client.kv_bucket(bucket_name(layout), layout, create=True)
        task = progress.add_task("replaying", total=len(requests))
        begin_s = time.perf_counter()
        outcomes = replay_all(
            Replay(bucket, layout),
            requests,
            options.concurrency,
            options.speed,
            lambda _: progress.advance(task),
        )
        elapsed_s = time.perf_counter() - begin_s
    return summarise(outcomes, first_askers(requests), elapsed_s)


def _introduction(requests: Sequence[TraceRequest], layout: KvLayout) -> str:
    blocks = sum(len(request.hash_ids) for request in requests)
    new_blocks = blocks - sum(map(len, first_askers(requests)))
    return (
        f"{len(requests):,} requests, {blocks:,} blocks of {layout.chunk_tokens} tokens; "
        f"a block is {layout.num_layers} layers x {layout.per_layer_chunk_bytes / KIB:.1f} KiB; "
        f"{new_blocks * layout.chunk_bytes / GIB:.2f} GiB to store, in {bucket_name(layout)}"
    )


def _as_json(options: ReplayOptions, layout: KvLayout, report: ReplayReport) -> bytes:
    content = {"options": options, "layout": layout, "report": report}
    return msgspec.json.format(msgspec.json.encode(content, enc_hook=str), indent=2)  # Path to str
