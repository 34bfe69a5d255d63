"""`objectcache calibrate` against real servers: what it shows, writes and leaves behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from objectcache_laboratory.calibration.bucket import PREFIX
from objectcache_laboratory.calibration.calibrate import PAYLOADS_BYTES, RATE_FACTORS
from objectcache_operations.console.app import app
from objectcache_schemas.operators.schedule import GetSchedule, ScheduleState
from tests.integration.served import BOUND_S, own_environment, wait_until
from tests.s3_clients import s3_client
from tests.servers import RunningServer, ServerProcess, running_server
from tests.storage_client import StorageClient

QUICK = ("--geometry", "quick=256KiB,4ms,4", "--repeats", "1")
ENDLESS = ("--geometry", "endless=1MiB,2s,32")


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose schedule these tests change."""
    with running_server(tmp_path_factory.mktemp("calibrated") / "data") as server:
        run_dir = f"server.run_dir={server.run_dir}"
        where = ["--data-dir", str(server.data_dir), "--set", run_dir, "--set", "admin.listen=off"]
        api = ServerProcess("objectcache_gateway.admin", where, server.data_dir / "admin.log")
        try:
            api.wait_ready()
            yield server
        finally:
            api.terminate()


def flags(server: RunningServer) -> list[str]:
    run_dir = f"server.run_dir={server.run_dir}"
    return ["--data-dir", str(server.data_dir), "--set", run_dir, "--endpoint", server.endpoint]


def calibrate(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["calibrate", *arguments])


def schedule(server: RunningServer) -> ScheduleState:
    with StorageClient(server.run_dir / "storage.sock") as storage:
        return storage.ask(GetSchedule(), ScheduleState)


def left_behind(server: RunningServer) -> list[str]:
    """Buckets of calibrations."""
    s3 = s3_client(server)
    names = [bucket["Name"] for bucket in s3.list_buckets()["Buckets"]]
    s3.close()
    return [name for name in names if name.startswith(PREFIX)]


def test_it_measures_shows_draws_and_writes_only_when_told(
    calibrated: RunningServer, tmp_path: Path
) -> None:
    picture = tmp_path / "curves.svg"
    shown = calibrate(*flags(calibrated), *QUICK, "--svg", str(picture))
    assert shown.exit_code == 0, shown.output
    for text in ("quick: 256.0 KiB a layer, 4ms, 4 layers", "no bound", "margin", "--apply"):
        assert text in shown.output
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    assert schedule(calibrated).changes.layerwise_threshold_bytes is None
    assert left_behind(calibrated) == []


def test_what_it_proposes_is_written_and_holds_after_a_restart(calibrated: RunningServer) -> None:
    applied = calibrate(*flags(calibrated), *QUICK, "--scale", "4", "--apply", "--json")
    assert applied.exit_code == 0, applied.output
    content = json.loads(applied.stdout)
    assert len(content["curves"][0]["readings"]) == len(RATE_FACTORS)
    assert len(content["modes"]) == len(PAYLOADS_BYTES)
    before = schedule(calibrated)
    assert before.changes.margin_gbps == content["margin_gbps"]
    measured = content["measured_margin_gbps"]
    assert measured is None or content["margin_gbps"] == pytest.approx(4 * measured)
    assert before.changes.layerwise_threshold_bytes == content["layerwise_threshold_bytes"]
    calibrated.restart_storage()
    assert schedule(calibrated).changes == before.changes
    assert left_behind(calibrated) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing_behind(
    calibrated: RunningServer, number: signal.Signals
) -> None:
    wait_until(lambda: not schedule(calibrated).delivery_count, "earlier deliveries to end")
    process = subprocess.Popen(
        [sys.executable, "-m", "objectcache_operations", "calibrate", *flags(calibrated), *ENDLESS],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=own_environment(),
    )
    try:
        wait_until(lambda: bool(schedule(calibrated).delivery_count), "a delivery")
        assert len(left_behind(calibrated)) == 1
        process.send_signal(number)
        assert process.wait(BOUND_S) != 0
    finally:
        process.kill()
        process.wait()
    assert left_behind(calibrated) == []


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--geometry", "wrong"], "NAME=BYTES_PER_LAYER,WINDOW,LAYERS"),
        (["--profile", "/nowhere.csv"], "/nowhere.csv: No such file"),
        (["--credentials", "/nowhere"], "credentials file /nowhere"),
        (["--apply"], "give --data-dir DIR"),
        (["--scale", "inf"], "4096"),
        (["--geometry", "slow=64KiB,2s,32"], "slow: the sweep begins at 8192 bytes"),
        (["--data-dir", "/nowhere", "--apply"], "/nowhere: there is no such directory"),
        (["--transport", "pigeon"], "pigeon"),
    ],
)
def test_what_is_missing_or_wrong_is_said_with_a_remedy(
    arguments: list[str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OBJECTCACHE_ACCESS_KEY", "key")
    monkeypatch.setenv("OBJECTCACHE_SECRET_KEY", "secret")
    result = calibrate(*arguments)
    assert result.exit_code in (1, 2)
    assert problem in result.output


def test_missing_credentials_and_a_missing_server_are_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("OBJECTCACHE_ACCESS_KEY", "OBJECTCACHE_SECRET_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert "OBJECTCACHE_ACCESS_KEY is not set" in calibrate().output
    monkeypatch.setenv("OBJECTCACHE_ACCESS_KEY", "key")
    monkeypatch.setenv("OBJECTCACHE_SECRET_KEY", "secret")
    result = calibrate("--endpoint", "http://127.0.0.1:9")
    assert result.exit_code == 1
    assert "ServiceUnavailable" in result.output
