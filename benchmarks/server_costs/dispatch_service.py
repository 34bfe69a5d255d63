"""What the dispatch service leaves of a decision: selects over loopback, beside the library's.

One process serves, this one asks: first on one connection, each select after the last, then on
several side by side. Every select is completed on the same connection, outside of what is timed.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.basis.bench import Bench
from benchmarks.basis.measure import Row
from objectcache_dispatch import ClusterDispatcher, DispatchRequest, DispatchSettings, symmetric

GROUP = "Dispatch service"
PREFILL_NODES, DECODE_NODES = 48, 96
SEED = 1
REQUESTS, QUICK_REQUESTS, CONNECTIONS = 2000, 200, 8
ROUNDS = 5  # of the rate
SERVER_US, CLIENT_US, WAKE_US = 125, 250, 30  # aiohttp's work for one small call; a thread's wake
DECISION_US = 50  # of the library
BETA_TOKENS = 1e9
LAYERS, LAYER_BYTES_MAX = 61, 40_000_000
TOKEN = "measured-on-loopback-alone"


def measure_dispatch_service(bench: Bench) -> Iterator[Row]:
    """Rows: the time of a select, and selects a second."""
    count = QUICK_REQUESTS if bench.scale.is_quick else REQUESTS
    library_us = sorted(_library_us(count))
    with tempfile.TemporaryDirectory() as folder:
        times_us, rates = asyncio.run(_measure(Path(folder), count))
    workers = 8 * (PREFILL_NODES + DECODE_NODES)
    middle = sorted(times_us)[len(times_us) // 2]
    yield Row(
        group=GROUP,
        name=f"select over loopback, {workers:,} workers",
        unit="us",
        samples=tuple(times_us),
        ratio=middle / library_us[len(library_us) // 2],
        ratio_of="the median, to the library's decision in this process",
        goal="",
        by_hand="aiohttp on both sides, two wakes, a decision: "
        f"{SERVER_US + CLIENT_US + 2 * WAKE_US + DECISION_US} us",
    )
    yield Row(
        group=GROUP,
        name=f"selects and completions, {CONNECTIONS} connections",
        unit="selects/s",
        samples=tuple(rates),
        ratio=None,
        ratio_of="",
        goal="",
        by_hand=f"one core, two calls each: {1e6 / (2 * SERVER_US + DECISION_US):,.0f}",
    )


def _requests() -> Iterator[dict[str, Any]]:
    chooser = random.Random(SEED)
    number = 0
    while True:
        number += 1
        yield {
            "name": f"r{number}",
            "cached_tokens": chooser.randrange(512, 65_536),
            "new_tokens": chooser.randrange(50, 900),
            "layer_bytes": chooser.randrange(1, LAYER_BYTES_MAX),
            "num_layers": LAYERS,
            "compute_window_s": 0.004,
        }


def _library_us(count: int) -> Iterator[float]:
    dispatcher = ClusterDispatcher(
        symmetric(PREFILL_NODES, DECODE_NODES), DispatchSettings(BETA_TOKENS)
    )
    for number, body in zip(range(count), _requests(), strict=False):
        read_bytes = body["layer_bytes"] * body["num_layers"]
        request = DispatchRequest(read_bytes=read_bytes, **body)
        now_s = number * 1e-3
        begun_s = time.perf_counter()
        decision = dispatcher.select(request, now_s)
        yield 1e6 * (time.perf_counter() - begun_s)
        assert decision is not None
        dispatcher.completed(request.name, now_s)


def _topology() -> str:
    """The same cluster as a topology file."""
    lines = list[str]()
    for node in symmetric(PREFILL_NODES, DECODE_NODES).nodes:
        lines.append("[[nodes]]")
        for field in ("name", "storage_nic_bytes_per_s", "compute_nic_bytes_per_s"):
            lines.append(f"{field} = {json.dumps(getattr(node, field))}")
        lines.append(f"compute_nics = {node.compute_nics}\nlanding_bytes = {node.landing_bytes}")
        for worker in node.workers:
            lines.append("[[nodes.workers]]")
            for field in ("name", "role", "group", "kv_capacity_tokens"):
                lines.append(f"{field} = {json.dumps(getattr(worker, field))}")
    return "\n".join(lines) + "\n"


async def _measure(folder: Path, count: int) -> tuple[list[float], list[float]]:
    (folder / "topology.toml").write_text(_topology())
    (folder / "token").write_text(TOKEN)
    (folder / "token").chmod(0o600)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "objectcache_gateway.dispatch_service"),
        *("--listen", "127.0.0.1:0", "--token-file", str(folder / "token")),
        *("--topology", str(folder / "topology.toml"), "--set", "dispatch.report_age_s_max=0"),
        *("--set", f"dispatch.beta_tokens={BETA_TOKENS}"),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        url = (await process.stdout.readline()).decode().split()[-1]
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with aiohttp.ClientSession(url, headers=headers) as session:
            requests = _requests()
            times_us = [await _select(session, next(requests)) for _ in range(count)]
            rates = list[float]()
            for _ in range(ROUNDS):
                begun_s = time.perf_counter()
                shares = [
                    [next(requests) for _ in range(count // CONNECTIONS)]
                    for _ in range(CONNECTIONS)
                ]
                await asyncio.gather(*(_select_all(session, share) for share in shares))
                done = CONNECTIONS * (count // CONNECTIONS)
                rates.append(done / (time.perf_counter() - begun_s))
    finally:
        process.terminate()
        await process.wait()
    return times_us, rates


async def _select_all(session: aiohttp.ClientSession, bodies: list[dict[str, Any]]) -> None:
    for body in bodies:
        await _select(session, body)


async def _select(session: aiohttp.ClientSession, body: dict[str, Any]) -> float:
    """Microseconds of the select; it is completed afterwards."""
    begun_s = time.perf_counter()
    async with session.post("/v1/select", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
    taken_us = 1e6 * (time.perf_counter() - begun_s)
    async with session.post(f"/v1/reservations/{body['name']}/complete") as response:
        assert response.status == 204
    return taken_us
