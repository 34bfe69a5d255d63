"""One soak: a server of its own, workers, samples, a verdict."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

import objectcache
from tests.integration.served import QUIET_SETTINGS, Served
from tests.soak.judge import SAMPLES_MIN, Sample, drift
from tests.soak.leftovers import delete_everything, leftovers
from tests.soak.load import (
    KV_BUCKET,
    LAYOUT,
    S3_BUCKET,
    AdminWorker,
    KvWorker,
    S3Worker,
    Tally,
    keep_working,
)

CAPACITY = "storage.capacity_bytes=268435456"
DATA_FILE = "storage.data_file_bytes=16777216"
WORKERS_OF_EACH_KIND = 3
JOIN_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a soak did, what it saw, and what is wrong (nothing, where all is well)."""

    seconds: float
    done: Mapping[str, int]
    samples: Mapping[str, list[Sample]]  # by process
    evicted_chunks: int
    wrong: list[str]


def soak(data_dir: Path, seconds: float, sample_every_s: float) -> Outcome:
    """Run the load against a server with its data in `data_dir`, which is small enough to evict."""
    settings = [word for text in (CAPACITY, DATA_FILE, *QUIET_SETTINGS) for word in ("--set", text)]
    with Served(data_dir, *settings) as served:
        served.wait_ready()
        outcome = _soak_served(served, seconds, sample_every_s)
        if served.stop() != 0:
            outcome.wrong.append("the servers did not stop cleanly")
    return outcome


def _soak_served(served: Served, seconds: float, sample_every_s: float) -> Outcome:
    tally = Tally()
    access_key, secret_key = served.credentials
    s3 = served.s3()
    admin_socket = served.data_dir / "run" / "admin.sock"
    s3.create_bucket(Bucket=S3_BUCKET)
    with objectcache.Client(
        served.endpoint, access_key=access_key, secret_key=secret_key
    ) as client:
        client.kv_bucket(KV_BUCKET, LAYOUT, create=True)
        workers: list[KvWorker | S3Worker | AdminWorker] = [
            worker
            for seed in range(WORKERS_OF_EACH_KIND)
            for worker in (KvWorker(client, tally, seed), S3Worker(served.s3(), tally, seed))
        ]
        workers.append(AdminWorker(admin_socket, tally))
        threads = [threading.Thread(target=keep_working, args=(one, tally)) for one in workers]
        for thread in threads:
            thread.start()
        samples = _watch(served, tally, seconds, sample_every_s)
        tally.stopping.set()
        for thread in threads:
            thread.join(JOIN_TIMEOUT_S)
        wrong = [f"a worker hangs: {thread.name}" for thread in threads if thread.is_alive()]
    if tally.failure is not None:
        wrong.append(f"the load failed: {tally.failure!r}")
    else:
        wrong += [words for name, seen in samples.items() for words in drift(name, seen)]
    evicted = tally.done["chunks"] - _stored_chunks(s3)
    delete_everything(s3, (KV_BUCKET, S3_BUCKET))
    wrong += leftovers(s3, admin_socket, (KV_BUCKET, S3_BUCKET))
    return Outcome(seconds, dict(tally.done), samples, evicted, wrong)


def _watch(
    served: Served, tally: Tally, seconds: float, sample_every_s: float
) -> dict[str, list[Sample]]:
    processes = {name: psutil.Process(pid) for name, pid in served.children().items()}
    samples: dict[str, list[Sample]] = {name: [] for name in processes}
    started_s = time.monotonic()
    count = 0
    while (elapsed_s := time.monotonic() - started_s) < seconds or count < SAMPLES_MIN:
        count += 1
        for name, process in processes.items():
            with process.oneshot():
                rss_bytes = process.memory_info().rss - _shared_bytes(process)
                samples[name].append(
                    Sample(elapsed_s, rss_bytes, process.num_fds(), process.num_threads())
                )
        if tally.stopping.wait(sample_every_s):
            break
    return samples


def _shared_bytes(process: psutil.Process) -> int:
    """Of files and of clients' targets: the page cache's and the clients', not its own."""
    return int(process.memory_info().shared)


def _stored_chunks(s3: object) -> int:
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=KV_BUCKET)  # type: ignore[attr-defined]
    return sum(page["KeyCount"] for page in pages)
