"""The operator's commands against a storage server of this process, with the test's engine."""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner, Result

from objectcache_gateway.admin.__main__ import make_server
from objectcache_gateway.signing.credentials import RootCredentials
from objectcache_gateway.storage.storage_address import StorageAddresses
from objectcache_operations.admin import api_client
from objectcache_operations.admin.api_client import ApiClient
from objectcache_operations.admin.command import local_access
from objectcache_operations.admin.status.status_view import status_view
from objectcache_operations.admin.storage import fsck
from objectcache_operations.admin.storage.buckets import bucket_lines
from objectcache_operations.console.app import app
from objectcache_runtime.amounts import (
    parse_size_bytes,
    parse_time_s,
    share_text,
    size_text,
    time_text,
)
from objectcache_runtime.settings import Settings, load_settings
from objectcache_schemas.errors import Busy, InvalidRequest, Unavailable
from objectcache_schemas.limits import GIB, KIB, MIB
from objectcache_schemas.messages.buckets import SetPolicy
from objectcache_schemas.messages.message import Message
from objectcache_schemas.operators.admin_api import BucketView, HealthReply
from objectcache_schemas.operators.engine_status import (
    CacheStatus,
    CheckEnded,
    CheckEngine,
    CheckProgress,
    CheckReport,
    EngineStatus,
    ExtentClass,
    PathStatus,
    SharedStatus,
)
from objectcache_schemas.operators.server_state import GetHealth, Health
from objectcache_schemas.records import (
    BucketPolicy,
    Durability,
    Freshness,
    StoredEncoding,
    Verification,
)
from objectcache_storage_server.connections.server import StorageServer
from objectcache_storage_server.engines.memory.engine import MemoryEngine
from objectcache_storage_server.operators import run_checks
from objectcache_storage_server.service import Service
from tests.contract.engine_suite import BUCKET, put
from tests.storage_client import StorageClient

WAIT_S = 20.0
NOBODY = 65534
ROOT = RootCredentials("test-root", "not-a-secret", "test")
STATUS = EngineStatus(
    engine="local",
    objects=12_345,
    damaged=2,
    capacity_bytes=10 * GIB,
    allocated_bytes=3 * GIB,
    live_bytes=2 * GIB,
    free_bytes=200 * MIB,
    largest_free_bytes=64 * MIB,
    data_files=4,
    extents=tuple(
        ExtentClass(slots=slots, count=slots, live_slots=slots * slots // 2, bytes=slots * MIB)
        for slots in (1, 2, 3, 5, 8, 13, 16, 100, 256)
    ),
    page_cache_budget_bytes=4 * GIB,
    page_cache_budget_source="cgroup v2",
    paths=(
        PathStatus(
            name="page_cache",
            extents=300,
            extent_bytes=2 * GIB,
            read_bytes=8 * GIB,
            hit_bytes=6 * GIB,
            overlap="intra",
            intra_bytes_per_s=5.5 * GIB,
            cross_bytes_per_s=4.5 * GIB,
        ),
        PathStatus(
            name="direct",
            extents=100,
            extent_bytes=GIB,
            read_bytes=GIB,
            hit_bytes=0,
            overlap="measuring",
            intra_bytes_per_s=None,
            cross_bytes_per_s=900.0 * MIB,
        ),
    ),
    device_path="io_uring",
    unflushed_extents=7,
    evicted_objects=1000,
    evicted_bytes=128 * MIB,
    expired_objects=11,
    compacted_objects=77,
    compacted_bytes=9 * MIB,
    compaction="moving a chain of 12 chunks",
    compaction_candidates=88,
    when_full="evict",
)


class OperatedEngine(MemoryEngine):
    """Has policies and pins; its status and its check's steps are set by the test."""

    def __init__(self) -> None:
        super().__init__()
        self.create_bucket(BUCKET)
        self.pinned: set[str] = set()
        self.shown = STATUS
        self.steps: Iterable[CheckReport] = ()
        self.may_end = threading.Event()  # a check goes on after its steps until it may
        self.may_end.set()
        self.check_ended = threading.Event()
        self.repairs: list[bool] = []

    def set_policy(self, name: str, policy: BucketPolicy) -> None:
        self.change_bucket(name, policy=policy)

    def pin(self, bucket: str, keys: Sequence[str], pinned: bool) -> int:
        stored = {key for key in keys if self.match(bucket, [key])}
        self.pinned = self.pinned | stored if pinned else self.pinned - stored
        return len(stored)

    def status(self) -> EngineStatus:
        return self.shown

    def check(self, repair: bool, on_progress: Callable[[CheckReport], bool]) -> CheckReport:
        self.repairs.append(repair)
        latest = CheckReport()
        try:
            for latest in self.steps:
                if not on_progress(latest):
                    return latest
            while not self.may_end.wait(0.001) and on_progress(latest):
                pass
        finally:
            self.check_ended.set()
        return latest


class ServerThread:
    """A storage server and its admin API in a thread of this process."""

    def __init__(self, settings: Settings, engine: OperatedEngine) -> None:
        self.settings = settings
        self._engine = engine
        self._ready: Future[asyncio.AbstractEventLoop] = Future()
        self._stopping = asyncio.Event()
        self._asked_to_stop = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        self._loop = self._ready.result(WAIT_S)

    async def _serve(self) -> None:
        service = self.service = Service(self.settings, self._engine)
        server = StorageServer(service)
        admin = make_server(self.settings, ROOT, StorageAddresses(self.settings))
        await server.start()
        await admin.start(self.settings.admin_socket)
        self._ready.set_result(asyncio.get_running_loop())
        await self._stopping.wait()
        await server.drain(WAIT_S)
        await admin.close()
        service.close()

    def begin_drain(self) -> None:
        if not self._asked_to_stop:
            self._asked_to_stop = True
            self._loop.call_soon_threadsafe(self._stopping.set)

    def stop(self) -> None:
        self.begin_drain()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


@pytest.fixture
def engine() -> OperatedEngine:
    return OperatedEngine()


@pytest.fixture
def server(
    engine: OperatedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ServerThread]:
    for name in [name for name in os.environ if name.startswith("OBJECTCACHE")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(run_checks, "PROGRESS_INTERVAL_S", 0.01)
    running = ServerThread(
        load_settings(None, {}, [f"server.data_dir={tmp_path}", f"server.run_dir={tmp_path}"]),
        engine,
    )
    yield running
    engine.may_end.set()
    running.stop()


def admin(server: ServerThread, *arguments: str) -> Result:
    """`objectcache admin ...` on this server."""
    data_dir = str(server.settings.data_dir)
    where = ["--data-dir", data_dir, "--set", f"server.run_dir={data_dir}"]
    return CliRunner().invoke(app, ["admin", *arguments, *where])


def document(result: Result) -> Any:
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.stdout)


# --- sizes and times ---


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("10GiB", 10 * GIB), ("1.5 kib", 1536), ("1B", 1), ("2GB", 2_000_000_000), ("1TiB", 1 << 40)],
)
def test_sizes_are_read_with_their_unit(text: str, size_bytes: int) -> None:
    assert parse_size_bytes(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "time_s"),
    [("7d", 604_800), ("90s", 90), ("1.5h", 5400), ("2W", 1_209_600), ("3m", 180)],
)
def test_times_are_read_with_their_unit(text: str, time_s: float) -> None:
    assert parse_time_s(text) == time_s


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("10", "'10' has no unit; give one of B, KiB"),
        ("10G", "unknown unit 'G'"),
        ("10d", "unknown unit 'd'"),
        ("-1GiB", "'-1GiB' is not a number"),
        ("1e3GiB", "is not a number"),
        ("GiB", "is not a number"),
        ("", "is not a number"),
        ("0GiB", "not an amount above 0"),
        ("0.5B", "less than a byte"),
        ("99999999TiB", "is too large; give none"),
        ("9" * 400 + "GiB", "not an amount above 0"),
    ],
)
def test_a_wrong_size_is_named(text: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        parse_size_bytes(text)


@given(st.integers(1, 1 << 50))
def test_a_shown_size_is_the_size_to_a_twentieth(size_bytes: int) -> None:
    shown = parse_size_bytes(size_text(size_bytes))
    assert abs(shown - size_bytes) <= size_bytes / 20


@given(st.integers(1, 10_000_000))
def test_a_shown_time_reads_back(time_s: int) -> None:
    assert parse_time_s(time_text(time_s)) == pytest.approx(time_s, rel=1e-5)


def test_a_share_of_nothing_is_a_dash() -> None:
    assert (share_text(1, 4), share_text(0, 0)) == ("25 %", "-")


# --- engine status ---


@pytest.mark.parametrize(
    ("encoded_bytes", "line"),
    [
        (2 * MIB, "3.0 MiB of slices in 2.0 MiB (1/1.50), 5.0 MiB to change"),
        (0, "0 B of slices in 0 B (1/1.00), 5.0 MiB to change"),
    ],
)
def test_the_status_says_what_is_encoded_and_what_is_to_be(encoded_bytes: int, line: str) -> None:
    status = msgspec.structs.replace(
        STATUS,
        encoded_bytes=encoded_bytes,
        decoded_bytes=encoded_bytes * 3 // 2,
        encoding_waiting_bytes=5 * MIB,
    )
    output = io.StringIO()
    Console(file=output, width=100, highlight=False).print(status_view(status))
    assert line in output.getvalue()


def test_a_bucket_shows_what_is_encoded_where_anything_is() -> None:
    info = msgspec.structs.asdict(BUCKET)
    plain = BucketView(**info, object_count=3, stored_bytes=6 * MIB)
    assert not any(line.startswith("encoded") for line in bucket_lines(plain))
    some = msgspec.structs.replace(plain, encoded_bytes=2 * MIB, decoded_bytes=3 * MIB)
    assert "encoded       3.0 MiB in 2.0 MiB (1/1.50)" in bucket_lines(some)


def test_the_status_fits_one_screen() -> None:
    output = io.StringIO()
    Console(file=output, width=80, height=24, highlight=False).print(status_view(STATUS))
    lines = output.getvalue().splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    words = " ".join(output.getvalue().split())
    for fact in (
        "12,345",
        "2 dropped",
        "3.0 GiB of 10.0 GiB (30 %)",
        "2.0 GiB of 4.0 GiB page cache (50 %) (cgroup v2)",
        "io_uring",
        "256 256 256.0 MiB 50 %",
        "3 others",
        "75 % intra 5.5 GiB/s 4.5 GiB/s",
        "measuring - 900.0 MiB/s",
        "evicted 1,000 objects (128.0 MiB), expired 11",
        "moving a chain of 12 chunks; moved 77 objects (9.0 MiB), 88 could lie better",
        "7 extents",
    ):
        assert fact in words


def test_the_status_of_a_shared_store_says_who_does_what() -> None:
    shared = SharedStatus(
        extents=1_234,
        buried_extents=56,
        buried_bytes=7 * MIB,
        freed_bytes=8 * GIB,
        swept_objects=9,
        log_end=654_321,
        lag_records=10,
        behind_s=12.3,
        lost_races=11,
        checkpoint=650_000,
        writers=3,
        fenced_writers=1,
        leads_upkeep=True,
        cache=CacheStatus(
            capacity_bytes=4 * GIB,
            used_bytes=3 * GIB,
            hit_bytes=75 * MIB,
            miss_bytes=25 * MIB,
            damaged_objects=2,
        ),
    )
    status = EngineStatus(
        engine="shared-rados",
        capacity_bytes=10 * GIB,
        allocated_bytes=3 * GIB,
        live_bytes=2 * GIB,
        evicted_objects=77,
        when_full="evict",
        shared=shared,
    )
    output = io.StringIO()
    Console(file=output, width=80, height=24, highlight=False).print(status_view(status))
    assert max(map(len, output.getvalue().splitlines())) <= 80
    words = " ".join(output.getvalue().split())
    for fact in (
        "3.0 GiB of 10.0 GiB, 2.0 GiB live, in 1,234 extents",
        "7.0 MiB in 56 extents",
        "replayed up to record 654,321, 10 records to replay, last reached 12 s ago",
        "checkpoint 650,000; 11 races lost",
        "3 alive, 1 dead with leftovers; upkeep is this server's",
        "evicted 77 objects",
        "8.0 GiB of the graveyard, 9 leftovers",
        "3.0 GiB of 4.0 GiB; answered 75.0 MiB of 100.0 MiB (75 %), dropped 2 objects",
    ):
        assert fact in words


def test_the_status_says_why_the_cache_of_a_shared_store_is_off() -> None:
    shared = SharedStatus(cache=CacheStatus(failure="it could not be read: Input/output error"))
    output = io.StringIO()
    console = Console(file=output, width=80, height=24, highlight=False)
    console.print(status_view(EngineStatus(engine="shared-s3", shared=shared)))
    assert "off, it could not be read: Input/output error; see" in output.getvalue()


def test_the_status_is_printed_or_given_as_one_document(server: ServerThread) -> None:
    assert "10.0 GiB" in admin(server, "engine", "status").stdout
    found = document(admin(server, "engine", "status", "--json"))
    assert msgspec.convert(found, EngineStatus) == STATUS


def test_an_engine_without_extents_says_so(server: ServerThread, engine: OperatedEngine) -> None:
    engine.shown = EngineStatus(engine="memory", objects=3)
    result = admin(server, "engine", "status")
    assert result.exit_code == 0
    assert "memory" in result.stdout
    assert "engine local only" in result.stdout


# --- policies ---


def test_a_policy_changes_where_it_is_told_and_nowhere_else(
    server: ServerThread, engine: OperatedEngine
) -> None:
    result = admin(server, "bucket", "policy", "bucket", "--quota", "10GiB", "--ttl", "7d")
    assert result.exit_code == 0
    assert "10.0 GiB" in result.stdout
    assert "7d" in result.stdout
    admin(server, "bucket", "policy", "bucket", "--durability", "async", "--ttl", "none")
    assert engine.bucket("bucket").policy == BucketPolicy(
        durability=Durability.ASYNC, quota_bytes=10 * GIB
    )
    shown = admin(server, "bucket", "policy", "bucket", "--reads", "indexed").stdout
    assert "reads         indexed" in shown
    assert engine.bucket("bucket").policy.reads is Freshness.INDEXED
    shown = admin(server, "bucket", "policy", "bucket", "--reads", "auto").stdout
    assert "reads         auto" in shown
    assert engine.bucket("bucket").policy.reads is None
    shown = admin(server, "bucket", "policy", "bucket", "--encoding", "planes-zstd").stdout
    assert "encoding      planes-zstd" in shown
    assert engine.bucket("bucket").policy.encoding is StoredEncoding.PLANES_ZSTD
    shown = admin(server, "bucket", "policy", "bucket", "--encoding", "none").stdout
    assert "encoding      none" in shown
    assert engine.bucket("bucket").policy.encoding is None


def test_a_policy_is_shown_with_every_field(server: ServerThread, engine: OperatedEngine) -> None:
    engine.set_policy("bucket", BucketPolicy(verification=Verification.SAMPLED))
    assert document(admin(server, "bucket", "policy", "bucket", "--json")) == {
        "bucket": "bucket",
        "policy": {
            "durability": "sync",
            "verification": "sampled",
            "quota_bytes": None,
            "ttl_s": None,
            "reads": None,
            "encoding": None,
        },
    }
    assert engine.bucket("bucket").policy == BucketPolicy(verification=Verification.SAMPLED)


@pytest.mark.parametrize(
    ("flag", "text", "words"),
    [
        ("--quota", "3", "--quota: '3' has no unit"),
        ("--ttl", "1y", "--ttl: '1y' has the unknown unit 'y'; give one of s, m, h, d, w, or none"),
        ("--durability", "maybe", "--durability: 'maybe' is not one of sync, async"),
        ("--verification", "no", "--verification: 'no' is not one of full, sampled, off"),
        ("--reads", "old", "--reads: 'old' is not one of fresh, indexed, auto"),
        (
            "--encoding",
            "zip",
            "--encoding: 'zip' is not one of planes-zstd, planes-deflate, none",
        ),
    ],
)
def test_a_wrong_flag_is_named_before_any_server_is_asked(
    tmp_path: Path, flag: str, text: str, words: str
) -> None:
    where = ["--data-dir", str(tmp_path / "absent")]
    result = CliRunner().invoke(app, ["admin", "bucket", "policy", "b", flag, text, *where])
    assert result.exit_code == 2
    assert words in result.stderr


def test_a_bucket_that_does_not_exist_is_one_line(server: ServerThread) -> None:
    result = admin(server, "bucket", "policy", "none")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "objectcache: bucket 'none' does not exist\n"


@pytest.mark.parametrize(
    "policy",
    [
        BucketPolicy(quota_bytes=0),
        BucketPolicy(quota_bytes=-1),
        BucketPolicy(ttl_s=0.0),
        BucketPolicy(ttl_s=math.nan),
        BucketPolicy(ttl_s=math.inf),
    ],
)
def test_the_server_refuses_a_policy_that_makes_no_sense(
    server: ServerThread, engine: OperatedEngine, policy: BucketPolicy
) -> None:
    with (
        StorageClient(server.settings.storage_socket) as storage,
        pytest.raises(InvalidRequest, match=r"quota_bytes|ttl_s"),
    ):
        storage.ask(SetPolicy(bucket="bucket", policy=policy), Health)
    assert engine.bucket("bucket").policy == BucketPolicy()


# --- pins ---


def test_pins_count_what_is_stored(server: ServerThread, engine: OperatedEngine) -> None:
    put(engine, "a", b"1")
    put(engine, "b", b"2")
    result = admin(server, "pin", "bucket", "a", "missing", "b")
    assert result.stdout == "2 of 3 pinned; 1 not stored\n"
    assert engine.pinned == {"a", "b"}
    assert document(admin(server, "unpin", "bucket", "b", "--json")) == {
        "bucket": "bucket", "pinned": False, "asked": 1, "count": 1
    }  # fmt: skip
    assert engine.pinned == {"a"}


def test_a_key_that_is_not_unicode_text_is_refused(server: ServerThread) -> None:
    result = admin(server, "pin", "bucket", "\udcff")
    assert result.exit_code == 2
    assert "not Unicode" in result.stderr


# --- fsck ---

BAD = CheckReport(
    objects=9,
    bytes=9 * KIB,
    damaged=1,
    misplaced=2,
    leaked_bytes=4096,
    dropped=1,
    examples=("'key\x1b[31m' is damaged", "two"),
)


def test_a_clean_check_exits_with_0(server: ServerThread, engine: OperatedEngine) -> None:
    engine.steps = [CheckReport(objects=9, bytes=9 * KIB)]
    result = admin(server, "fsck")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == "checked 9 objects, 9.0 KiB: clean\n"
    assert engine.repairs == [False]


@pytest.mark.parametrize(
    "report",
    [CheckReport(damaged=1), CheckReport(misplaced=1), CheckReport(leaked_bytes=1)],
)
def test_any_finding_exits_with_1(
    server: ServerThread, engine: OperatedEngine, report: CheckReport
) -> None:
    engine.steps = [report]
    assert admin(server, "fsck").exit_code == 1


def test_findings_are_shown_without_what_steers_a_terminal(
    server: ServerThread, engine: OperatedEngine
) -> None:
    engine.steps = [BAD]
    result = admin(server, "fsck")
    assert "1 objects do not match their checksums" in result.stdout
    assert "  - 'key\\x1b[31m' is damaged\n  - two\n" in result.stdout
    assert "--repair" in result.stdout
    repaired = admin(server, "fsck", "--repair")
    assert "--repair" not in repaired.stdout
    assert repaired.exit_code == 1
    assert engine.repairs == [False, True]


def test_a_check_is_one_document(server: ServerThread, engine: OperatedEngine) -> None:
    engine.steps = [BAD]
    result = admin(server, "fsck", "--json")
    assert result.exit_code == 1
    assert msgspec.convert(document(result), CheckReport) == BAD


def test_a_terminal_shows_how_far_the_check_is(
    server: ServerThread, engine: OperatedEngine
) -> None:
    so_far = CheckReport(objects=77, bytes=GIB, damaged=5)
    engine.steps = [so_far]
    engine.may_end.clear()
    output = _Terminal(engine.may_end, "77 objects, 5 bad")
    with ApiClient(local_access(server.settings)) as client:
        report = fsck.check(client, False, Console(file=output, force_terminal=True, width=100))
    assert report == so_far
    assert "77 objects, 5 bad" in output.getvalue()
    assert "1.0/2.0 GiB" in output.getvalue()


class _Terminal(io.StringIO):
    """Sets an event when words have been written to it."""

    def __init__(self, seen: threading.Event, words: str) -> None:
        super().__init__()
        self._seen, self._words = seen, words

    def write(self, text: str) -> int:
        if self._words in text:
            self._seen.set()
        return super().write(text)


def test_one_check_runs_at_a_time(server: ServerThread, engine: OperatedEngine) -> None:
    engine.may_end.clear()
    path = server.settings.storage_socket
    with StorageClient(path) as first, StorageClient(path) as second:
        first.send(CheckEngine(repair=False))
        first.reply(CheckProgress)
        with pytest.raises(Busy, match="another check") as caught:
            second.ask(CheckEngine(repair=False), CheckEnded)
        assert caught.value.details.retry_after_s is not None
        second.ask(GetHealth(), Health)  # the connection takes the next request
        assert admin(server, "fsck").exit_code == 2
        engine.may_end.set()
        assert last_message(first) == CheckEnded(report=CheckReport())
        second.send(CheckEngine(repair=False))
        assert last_message(second) == CheckEnded(report=CheckReport())
    assert engine.repairs == [False, False]


def last_message(storage: StorageClient) -> Message:
    """The end of a check, after any progress."""
    while isinstance(message := storage.reply(Message), CheckProgress):
        pass
    return message


def test_hanging_up_ends_the_check(server: ServerThread, engine: OperatedEngine) -> None:
    engine.may_end.clear()
    with StorageClient(server.settings.storage_socket) as storage:
        storage.send(CheckEngine(repair=False))
        storage.reply(CheckProgress)
    assert engine.check_ended.wait(WAIT_S)


def test_an_interrupt_ends_the_command_and_the_check(
    server: ServerThread, engine: OperatedEngine, request: pytest.FixtureRequest
) -> None:
    # A shell's background jobs ignore interrupts, and so do their children.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, previous))

    def interrupt() -> Iterator[CheckReport]:
        os.kill(os.getpid(), signal.SIGINT)  # lands in the main thread, which waits for the check
        yield CheckReport()

    engine.steps = interrupt()
    engine.may_end.clear()
    result = admin(server, "fsck")
    assert (result.exit_code, result.stdout) == (130, "")
    assert "ended before it was through" in result.stderr
    assert engine.check_ended.wait(WAIT_S)


def test_a_server_that_stops_ends_the_check_and_says_so(
    server: ServerThread, engine: OperatedEngine
) -> None:
    engine.may_end.clear()
    with StorageClient(server.settings.storage_socket) as storage:
        storage.send(CheckEngine(repair=False))
        storage.reply(CheckProgress)
        server.begin_drain()
        with pytest.raises(Unavailable, match="did not finish"):
            last_message(storage)


# --- finding the server ---


def unreachable(run_dir: Path) -> str:
    """What `engine status` says of a server with its sockets there."""
    where = ["--data-dir", str(run_dir), "--set", f"server.run_dir={run_dir}"]
    result = CliRunner().invoke(app, ["admin", "engine", "status", *where])
    assert (result.exit_code, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    return result.stderr


def test_without_a_server_the_path_and_the_remedy_are_named(tmp_path: Path) -> None:
    message = unreachable(tmp_path / "absent")
    assert str(tmp_path / "absent" / "admin.sock") in message
    assert "--data-dir" in message


def test_a_server_that_has_died_is_told_from_none(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(tmp_path / "admin.sock"))
    assert "any more; start the server again" in unreachable(tmp_path)


def test_without_a_data_directory_the_flag_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OBJECTCACHE_SERVER_DATA_DIR", raising=False)
    result = CliRunner().invoke(app, ["admin", "fsck"])
    assert result.exit_code == 2
    assert "give --data-dir DIR" in result.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_told_whom_to_be(server: ServerThread) -> None:
    # The command imports its modules when it first runs, from where nobody else may be able to.
    unreachable(server.settings.run_dir / "absent")
    os.seteuid(NOBODY)
    try:
        message = unreachable(server.settings.run_dir)
    finally:
        os.seteuid(0)
    assert "permission denied; run this as the server's own user" in message


def test_a_socket_of_another_program_is_no_admin_api(tmp_path: Path) -> None:
    settings = load_settings(None, {}, [f"server.run_dir={tmp_path}"])
    with socket.create_server(str(settings.admin_socket), family=socket.AF_UNIX) as listener:

        def answer() -> None:
            connected, _ = listener.accept()
            with connected:
                connected.recv(1000)  # unread, it would end the connection before the answer
                connected.sendall(b"220 mail.example\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with (
            ApiClient(local_access(settings)) as client,
            pytest.raises(Unavailable, match=r"ended, or is none"),
        ):
            client.get("/v1/health", HealthReply)
        thread.join(WAIT_S)


def test_a_server_that_says_nothing_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_client, "TIMEOUT_S", 0.05)
    settings = load_settings(None, {}, [f"server.run_dir={tmp_path}"])
    with (
        socket.create_server(str(settings.admin_socket), family=socket.AF_UNIX),
        ApiClient(local_access(settings)) as client,
        pytest.raises(Unavailable, match=r"says nothing for 0\.05 s"),
    ):
        client.get("/v1/health", HealthReply)
