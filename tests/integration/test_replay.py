"""`objectcache bench replay` against a running server, with real hits, bytes and puts."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from objectcache_laboratory.replay.trace import TraceRequest, read_trace
from objectcache_laboratory.replay.workload import (
    bucket_name,
    chunk_keys,
    first_askers,
    replay_layout,
)
from objectcache_operations.console.app import app
from tests.integration.served import own_environment
from tests.s3_clients import s3_client
from tests.servers import RunningServer, running_server

REAL_TRACE = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation.jsonl"
SCALE, LAYERS = 0.001, 8
LAYOUT = replay_layout(SCALE, LAYERS, 512, seed=0)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One server for the tests of this file."""
    with running_server(tmp_path_factory.mktemp("replay") / "data") as server:
        yield server


@pytest.fixture(autouse=True)
def _no_settings_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OBJECTCACHE")]:
        monkeypatch.delenv(name)


def trace_of(directory: Path, requests: list[TraceRequest]) -> Path:
    """The requests as a trace file."""
    file = directory / "trace.jsonl"
    file.write_text(
        "".join(
            json.dumps(
                {
                    "timestamp": request.timestamp,
                    "input_length": request.input_length,
                    "output_length": request.output_length,
                    "hash_ids": request.hash_ids,
                }
            )
            + "\n"
            for request in requests
        )
    )
    return file


def conversation() -> list[TraceRequest]:
    """Turns that grow, a repetition, and another conversation behind the same system prompt."""
    turns = [range(3), range(5), range(5), [0, 1, 50, 51], range(9)]
    return [TraceRequest(10 * n, 512 * len(ids) - 12, 4, tuple(ids)) for n, ids in enumerate(turns)]


def replay(
    served: RunningServer, trace: Path, seed: int, *flags: str
) -> tuple[Result, dict[str, Any]]:
    """Run the command; its result and its report."""
    json_file = trace.parent / "report.json"
    result = CliRunner().invoke(
        app,
        [
            *("bench", "replay", "--trace", str(trace), "--endpoint", served.endpoint),
            *("--credentials-file", str(served.credentials_file)),
            *("--scale", str(SCALE), "--layers", str(LAYERS), "--seed", str(seed)),
            *("--json", str(json_file), *flags),
        ],
    )
    report = json.loads(json_file.read_text())["report"] if json_file.exists() else {}
    return result, report


@pytest.mark.parametrize(("seed", "transport"), [(1, "shared_memory"), (2, "body"), (3, "auto")])
def test_hits_bytes_and_times_are_those_of_the_trace(
    served: RunningServer, tmp_path: Path, seed: int, transport: str
) -> None:
    requests = conversation()
    trace = trace_of(tmp_path, requests)
    flags = ("--concurrency", "1", "--transport", transport)
    result, report = replay(served, trace, seed, *flags)
    assert result.exit_code == 0, result.stderr
    matches = [len(askers) for askers in first_askers(requests)]
    assert matches == [0, 3, 5, 2, 5]
    assert report["matched_blocks"] == sum(matches)
    assert report["matched_tokens"] == 3 * 512 + (5 * 512 - 12) + 2 * 512 + 5 * 512
    assert report["fetched_bytes"] == sum(matches) * LAYOUT.chunk_bytes
    assert report["put_bytes"] == (26 - sum(matches)) * LAYOUT.chunk_bytes
    assert report["wrong_bytes"] == 0
    assert report["errors"] == {}
    assert report["first_layer"]["count"] == report["last_layer"]["count"] == 4
    assert report["first_layer"]["p50_s"] <= report["last_layer"]["p50_s"]
    assert "hit rate, blocks" in result.stdout


def test_a_second_replay_finds_everything_and_another_seed_nothing(
    served: RunningServer, tmp_path: Path
) -> None:
    trace = trace_of(tmp_path, conversation())
    replay(served, trace, 10)
    _, again = replay(served, trace, 10)
    assert again["matched_blocks"] == again["blocks"] == 26
    assert again["put_bytes"] == 0
    _, other = replay(served, trace, 11, "--concurrency", "1")
    assert other["matched_blocks"] == 15


def test_concurrent_requests_for_the_same_new_chunks_all_succeed(
    served: RunningServer, tmp_path: Path
) -> None:
    same = [TraceRequest(0, 512 * 20, 1, tuple(range(20))) for _ in range(16)]
    result, report = replay(served, trace_of(tmp_path, same), 20, "--concurrency", "8")
    assert result.exit_code == 0, result.stderr + result.stdout
    assert (report["errors"], report["wrong_bytes"]) == ({}, 0)


def test_a_trace_can_be_replayed_at_its_own_pace(served: RunningServer, tmp_path: Path) -> None:
    result, report = replay(served, trace_of(tmp_path, conversation()), 30, "--speed", "1")
    assert result.exit_code == 0
    assert report["elapsed_s"] >= 0.04


def test_a_slice_of_a_real_trace_is_replayed_without_a_wrong_byte(
    served: RunningServer, tmp_path: Path
) -> None:
    if not REAL_TRACE.exists():
        pytest.skip("no real trace: ../shared/traces/mooncake_conversation.jsonl is not there")
    trace = tmp_path / REAL_TRACE.name
    trace.symlink_to(REAL_TRACE)
    result, report = replay(served, trace, 40, "--requests", "40", "--concurrency", "4")
    assert result.exit_code == 0, result.stdout
    assert report["requests"] == 40
    assert report["blocks"] == sum(len(r.hash_ids) for r in read_trace(REAL_TRACE, 40, 512))
    assert 0 < report["matched_blocks"] <= report["expected_blocks"]


def test_wrong_bytes_in_the_store_fail_the_replay(served: RunningServer, tmp_path: Path) -> None:
    """Other bytes under a key of the trace, put there as a plain object."""
    request = TraceRequest(0, 512, 1, (7,))
    layout = replay_layout(SCALE, LAYERS, 512, seed=50)
    s3 = s3_client(served)
    s3.create_bucket(Bucket=bucket_name(layout))
    s3.put_object(
        Bucket=bucket_name(layout),
        Key=chunk_keys(layout, request)[0],
        Body=bytes(layout.chunk_bytes),
    )
    s3.close()
    result, report = replay(served, trace_of(tmp_path, [request]), 50)
    assert result.exit_code == 1
    assert report["wrong_bytes"] > 0.9 * layout.chunk_bytes


def test_a_malformed_trace_is_refused_by_line_and_field(
    served: RunningServer, tmp_path: Path
) -> None:
    trace = trace_of(tmp_path, conversation())
    trace.write_text(trace.read_text() + '{"timestamp": 1, "input_length": "x"}\n')
    result, report = replay(served, trace, 60)
    assert result.exit_code == 2
    assert f"trace {trace}, line 6: " in result.stderr
    assert "$.input_length" in result.stderr
    assert report == {}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--json", "/proc/none/report.json"), "there is no directory"),
        (("--json", "/"), "is a directory"),
        (("--transport", "pigeon"), "transport must be one of"),
    ],
)
def test_wrong_flags_are_refused_before_anything_runs(
    tmp_path: Path, flags: tuple[str, str], words: str
) -> None:
    where = ("--trace", str(trace_of(tmp_path, conversation())), "--endpoint", "http://127.0.0.1:1")
    result = CliRunner().invoke(
        app,
        ["bench", "replay", *where, *flags],
        env={"OBJECTCACHE_ACCESS_KEY": "key", "OBJECTCACHE_SECRET_KEY": "secret"},
    )
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_server_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, conversation())
    result = subprocess.run(
        [
            *(sys.executable, "-m", "objectcache_operations", "bench", "replay"),
            *("--trace", str(trace), "--endpoint", "http://127.0.0.1:1"),
        ],
        capture_output=True,
        text=True,
        env={
            **own_environment(),
            "OBJECTCACHE_ACCESS_KEY": "access",
            "OBJECTCACHE_SECRET_KEY": "secret",
        },
        timeout=100,
        check=False,
    )
    assert result.returncode == 1
    assert "ServiceUnavailable" in result.stderr
    assert "Traceback" not in result.stderr
