"""Commits a second of one bucket by several servers, and whether each acknowledged put is there."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.basis.measure import Row
from benchmarks.shared_store.bench import SharedBench
from benchmarks.shared_store.one_server import BUCKET, chunk_keys, commit, opened_server, staged
from objectcache_storage_server.engines.base import PrefixShape

CHUNKS, LAYERS, SLICE_BYTES = 28, 32, 16
START_S = 60.0
PAGE = 10_000


def measure_servers(bench: SharedBench) -> Iterator[Row]:
    """Each server is a process that puts one prefix after the other."""
    cores = os.cpu_count()
    group = f"RADOS: puts of {CHUNKS} small chunks by several servers, one bucket, {cores} cores"
    alone = 0.0
    for count in bench.amount.server_counts:
        address = bench.address(bench.ceph.create_pool())
        puts, lost_races = _run(bench, address, bench.folder / f"servers-{count}", count)
        lost, twice = _judged(address, bench.folder / f"judge-{count}", puts)
        rate = len(puts) / bench.amount.seconds
        alone = alone or rate
        found = f"{len(puts)} acknowledged, {lost} lost, {twice} twice; {lost_races} lost races"
        name = f"{count} servers: {found}"
        yield Row(group, name, "commits/s", (rate,), rate / alone, "one server", "0 lost", "")


def _run(bench: SharedBench, address: str, folder: Path, count: int) -> tuple[list[str], int]:
    """Names of the acknowledged puts, and races that were lost."""
    context = multiprocessing.get_context("spawn")
    with opened_server(address, folder / "first"):
        pass  # the store and its bucket are made
    pipes: list[Connection] = []
    processes = []
    for number in range(count):
        here, there = context.Pipe()
        words = (there, address, folder / str(number), number)
        processes.append(context.Process(target=_serve, args=words, daemon=True))
        processes[-1].start()
        pipes.append(here)
    for pipe in pipes:
        assert pipe.poll(START_S), "a server does not start"
        pipe.recv()
    end_s = time.monotonic() + bench.amount.seconds
    for pipe in pipes:
        pipe.send(end_s)
    answers = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    return [name for names, _ in answers for name in names], sum(races for _, races in answers)


def _serve(there: Connection, address: str, folder: Path, number: int) -> None:
    names: list[str] = []
    with opened_server(address, folder, upkeep_s=1.0) as engine:
        there.send(None)
        end_s = there.recv()
        while not names or time.monotonic() < end_s:
            name = f"s{number}p{len(names)}"
            shape = PrefixShape(chunk_keys(name, CHUNKS), LAYERS, SLICE_BYTES, layerwise=True)
            commit(engine, staged(engine, shape))
            names.append(name)
        there.send((names, engine.catalog.lost_races))


def _judged(address: str, folder: Path, puts: list[str]) -> tuple[int, int]:
    """Keys that a server which starts afterwards does not find, and that it finds twice."""
    found: list[str] = []
    with opened_server(address, folder) as engine:
        after = ""
        while page := engine.scan(BUCKET, "", after, PAGE):
            found += [info.key for info in page]
            after = found[-1]
    wanted = {key for name in puts for key in chunk_keys(name, CHUNKS)}
    return len(wanted - set(found)), len(found) - len(set(found))
