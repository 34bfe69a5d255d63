"""Ordinary S3 requests, against Ceph's radosgw in the same run: `python -m benchmarks.s3`.

The figure that counts is requests per second of processor time of all processes that serve, because
on a small machine the load shares the cores. Both sides keep what they acknowledge on the device,
both run without access logs, and the two are asked in turn.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import boto3
import msgspec
import psutil
from botocore.config import Config

from benchmarks.basis.bench import Bench
from benchmarks.basis.measure import Row, Samples, rates
from benchmarks.basis.server import Server
from benchmarks.machine.loopback import loopback_stream
from benchmarks.machine.page_cache_copy import FileRun
from benchmarks.s3.radosgw import missing_programs, processor_s, running_radosgw
from benchmarks.s3.request_load import Load, Outcome
from objectcache_schemas.limits import KIB, MIB

GROUP = "Ordinary S3 requests, HTTP, of radosgw on one OSD"
GROUP_LARGE = "GET of 8 MiB, of sendfile to one loopback stream"
BUCKET = "requests"
SMALL_BYTES, LARGE_BYTES = 4 * KIB, 8 * MIB
SMALL_KEYS, LARGE_KEYS = 500, 8
CONCURRENCIES = (1, 8, 32)
SENDFILE, FROM_MEMORY = "limit: one loopback stream by sendfile", "one loopback stream from memory"
OURS = "GET 8 MiB, 1 at once"
BY_HAND = "signature, HTTP and one lookup in C++: about 250 us, 4,000/s"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server, its credentials, and the processes whose time counts."""

    name: str
    host: str
    port: int
    access_key: str
    secret_key: str = field(repr=False)
    pids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """One load on one server."""

    outcome: Outcome
    processor_s: float

    @property
    def per_s(self) -> float:
        """Requests per second."""
        return self.outcome.count / self.outcome.elapsed_s

    @property
    def per_processor_s(self) -> float:
        """Requests per second of processor time of the server."""
        return self.outcome.count / max(self.processor_s, 0.01)


@dataclass(frozen=True, slots=True)
class Question:
    """One kind of request at one concurrency."""

    method: str
    body_bytes: int
    connections: int

    @property
    def name(self) -> str:
        """How the rows call it."""
        size = f"{self.body_bytes // KIB} KiB"
        if self.body_bytes >= MIB:
            size = f"{self.body_bytes // MIB} MiB"
        return f"{self.method} {size}, {self.connections} at once"


QUESTIONS = [
    Question(method, body_bytes, connections)
    for body_bytes in (SMALL_BYTES, LARGE_BYTES)
    for method in ("GET", "PUT")
    for connections in CONCURRENCIES
]


def measure_s3(bench: Bench) -> Iterator[Row]:
    """Rows for every question; without radosgw only our own figures."""
    with ExitStack() as opened:
        ours = _our_endpoint(opened.enter_context(bench.server()))
        endpoints = [ours]
        if reason := missing_programs():
            print(f"radosgw is left out: {reason}", file=sys.stderr)
        else:
            peer = opened.enter_context(running_radosgw())
            endpoints.append(
                Endpoint(
                    "radosgw", peer.host, peer.port, peer.access_key, peer.secret_key, peer.pids
                )
            )
        for endpoint in endpoints:
            _fill(endpoint)
        duration_s = 1.0 if bench.scale.is_quick else 4.0
        rounds = 1 if bench.scale.is_quick else 3
        for question in QUESTIONS:
            samples = _in_turn(endpoints, question, rounds, duration_s)
            yield from _rows(question, samples)
        yield from _large_rows(bench, ours, duration_s)


def _our_endpoint(server: Server) -> Endpoint:
    supervisor = psutil.Process(server.storage_pid).parent()
    assert supervisor is not None
    pids = [supervisor.pid, *(child.pid for child in supervisor.children(recursive=True))]
    parts = urlsplit(server.endpoint)
    assert parts.hostname is not None
    assert parts.port is not None
    return Endpoint(
        "objectcache", parts.hostname, parts.port, server.access_key, server.secret_key, tuple(pids)
    )


def _fill(endpoint: Endpoint) -> None:
    """The bucket, and the objects that are read."""
    s3 = boto3.client(
        "s3",
        endpoint_url=f"http://{endpoint.host}:{endpoint.port}",
        aws_access_key_id=endpoint.access_key,
        aws_secret_access_key=endpoint.secret_key,
        region_name="us-east-1",
        config=Config(signature_version="s3v4", s3={"addressing_style": "path"}),
    )
    s3.create_bucket(Bucket=BUCKET)
    s3.close()
    for question in (Question("PUT", SMALL_BYTES, 1), Question("PUT", LARGE_BYTES, 1)):
        ask(endpoint, question, 0.0, prefix="get", whole=True)


def _in_turn(
    endpoints: Sequence[Endpoint], question: Question, rounds: int, duration_s: float
) -> dict[str, list[Sample]]:
    samples: dict[str, list[Sample]] = {endpoint.name: [] for endpoint in endpoints}
    for _ in range(rounds):
        for endpoint in endpoints:
            prefix = "get" if question.method == "GET" else "put"
            samples[endpoint.name].append(ask(endpoint, question, duration_s, prefix=prefix))
    return samples


def ask(
    endpoint: Endpoint, question: Question, duration_s: float, *, prefix: str, whole: bool = False
) -> Sample:
    """One load, by a process of its own. `whole`: each key once. Raises `RuntimeError`."""
    key_count = SMALL_KEYS if question.body_bytes < MIB else LARGE_KEYS
    load = Load(
        host=endpoint.host,
        port=endpoint.port,
        access_key=endpoint.access_key,
        secret_key=endpoint.secret_key,
        method=question.method,
        bucket=BUCKET,
        prefix=f"{prefix}-{question.body_bytes}",
        key_count=key_count,
        body_bytes=question.body_bytes,
        connections=question.connections,
        duration_s=duration_s,
        count_min=key_count if whole else 0,
    )
    sample = _carried_out(endpoint, load)
    if sample.outcome.failed:
        raise RuntimeError(f"{endpoint.name}: {sample.outcome.failed} of {question.name} failed")
    return sample


def _carried_out(endpoint: Endpoint, load: Load) -> Sample:
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.s3.request_load"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(load) + b"\n")
        process.stdin.flush()
        process.stdout.readline()  # the requests are signed
        before_s = processor_s(endpoint.pids)
        process.stdin.write(b"go\n")
        process.stdin.flush()
        line = process.stdout.readline()
        used_s = processor_s(endpoint.pids) - before_s
    if not line:
        raise RuntimeError(f"{endpoint.name} closed a connection")
    return Sample(msgspec.json.decode(line, type=Outcome), used_s)


def _rows(question: Question, samples: dict[str, list[Sample]]) -> Iterator[Row]:
    peers = samples.get("radosgw", [])
    peer = statistics.median(each.per_processor_s for each in peers) if peers else None
    is_goal = question.method == "GET" and question.body_bytes == SMALL_BYTES
    for name, taken in samples.items():
        per_processor_s = [each.per_processor_s for each in taken]
        yield Row(
            group=GROUP,
            name=f"{name}: {question.name}",
            unit="/s a core",
            samples=tuple(per_processor_s),
            ratio=statistics.median(per_processor_s) / peer if peer else None,
            ratio_of="radosgw, a second of processor time",
            goal="at least 1" if is_goal and name == "objectcache" else "",
            by_hand=BY_HAND if is_goal else "",
            details={
                "requests_per_s": statistics.median(each.per_s for each in taken),
                "p50_ms": 1000 * statistics.median(each.outcome.p50_s for each in taken),
                "p99_ms": 1000 * statistics.median(each.outcome.p99_s for each in taken),
            },
        )


def _large_rows(bench: Bench, ours: Endpoint, duration_s: float) -> Iterator[Row]:
    """One GET at a time against a plain stream, in turn."""
    samples = Samples()
    question = Question("GET", LARGE_BYTES, 1)
    with bench.place() as folder:
        file = folder / "large"
        file.write_bytes(bytes(LARGE_BYTES))
        run = FileRun(file, 0, LARGE_BYTES)
        with loopback_stream(LARGE_BYTES, [run]) as stream:
            stream.from_files()
            for _ in range(max(3, bench.scale.repeats)):
                for _ in range(20):
                    samples.take(SENDFILE, stream.from_files)
                    samples.take(FROM_MEMORY, stream.from_memory)
                sample = ask(ours, question, duration_s / 4, prefix="get")
                samples.add(OURS, sample.outcome.p50_s)
    limit_s = samples.median_s(SENDFILE)
    for name in (OURS, SENDFILE, FROM_MEMORY):
        yield Row(
            group=GROUP_LARGE,
            name=name,
            unit="GiB/s",
            samples=rates(samples.seconds[name], LARGE_BYTES),
            ratio=limit_s / samples.median_s(name),
            ratio_of=SENDFILE,
            goal="at least 0.8" if name == OURS else "",
            by_hand="",
        )
