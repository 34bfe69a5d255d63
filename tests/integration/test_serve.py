"""`objectcache serve`, with real processes: what a user, a crash and an operator see."""

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.served import BOUND_S, QUIET_SETTINGS, Served, own_environment, wait_until

GATEWAY, STORAGE = "objectcache_gateway", "objectcache_storage_server"
ADMIN = "objectcache_gateway.admin"


@contextlib.contextmanager
def served_quietly(data_dir: Path, *more: str) -> Iterator[Served]:
    settings = [part for setting in (*QUIET_SETTINGS, *more) for part in ("--set", setting)]
    with Served(data_dir, *settings) as server:
        server.wait_ready()
        yield server


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A server that is ready."""
    with served_quietly(tmp_path / "data") as server:
        yield server


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server for tests that leave it serving."""
    with served_quietly(tmp_path_factory.mktemp("lasting") / "data") as server:
        yield server


def test_it_says_where_it_serves_and_where_the_credentials_are_but_no_secret(
    lasting: Served,
) -> None:
    _, secret_key = lasting.credentials
    file = lasting.data_dir / "root-credentials"
    assert lasting.printed[1:3] == [f"credentials {file}", f"data {lasting.data_dir}"]
    assert lasting.printed[3].startswith("admin http://127.0.0.1:")
    assert secret_key not in "".join(lasting.printed) + lasting.errors()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_health_answers_without_authentication(lasting: Served) -> None:
    assert lasting.health_status() == 200


def test_what_was_put_is_there_after_a_stop_and_a_start(served: Served) -> None:
    body = os.urandom(300_000)
    s3 = served.s3()
    s3.create_bucket(Bucket="kept")
    s3.put_object(Bucket="kept", Key="a/b", Body=body)
    assert s3.get_object(Bucket="kept", Key="a/b")["Body"].read() == body
    s3.close()
    first_credentials = served.credentials
    assert served.stop() == 0
    with Served(served.data_dir) as again:
        again.wait_ready()
        assert again.credentials == first_credentials
        s3 = again.s3()
        assert s3.get_object(Bucket="kept", Key="a/b")["Body"].read() == body
        s3.close()


def test_nobody_else_reads_what_a_server_keeps_also_where_a_file_was_open_to_others(
    served: Served,
) -> None:
    s3 = served.s3()
    s3.create_bucket(Bucket="kept")
    s3.put_object(Bucket="kept", Key="a/b", Body=b"c")
    s3.close()
    assert served.stop() == 0
    reserve = served.data_dir / "index" / "reserve"
    reserve.chmod(0o644)
    with Served(served.data_dir) as again:
        again.wait_ready()
        modes = {
            path: path.lstat().st_mode for path in (again.data_dir, *again.data_dir.rglob("*"))
        }
        assert reserve in modes
        assert any(stat.S_ISSOCK(mode) for mode in modes.values())
        open_to_others = [str(path) for path, mode in modes.items() if mode & 0o077]
        assert open_to_others == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_all_processes_without_a_drain_where_nothing_is_in_flight(
    tmp_path: Path, number: signal.Signals
) -> None:
    drains = ("gateway.drain_timeout_s=600", "storage.drain_timeout_s=600")
    with served_quietly(tmp_path / "data", *drains) as served:
        check_stop(served, number)


def check_stop(served: Served, number: signal.Signals) -> None:
    children = served.children()
    assert set(children) == {GATEWAY, STORAGE, ADMIN}
    served.process.send_signal(number)
    assert served.wait_exit() == 0
    assert not any(psutil.pid_exists(pid) for pid in children.values())
    assert not (served.data_dir / "run" / "storage.sock").exists()
    assert not (served.data_dir / "run" / "admin.sock").exists()


def test_a_gateway_that_is_killed_comes_back_on_the_same_port(served: Served) -> None:
    first_pid = served.children()[GATEWAY]
    os.kill(first_pid, signal.SIGKILL)
    wait_until(
        lambda: served.health_status() == 200 and served.children().get(GATEWAY) != first_pid,
        "the gateway to serve again",
    )
    assert "the gateway was killed by SIGKILL; starting it again" in served.errors()
    assert served.stop() == 0


def test_a_storage_server_that_is_killed_comes_back_with_what_was_stored(lasting: Served) -> None:
    s3 = lasting.s3()
    s3.create_bucket(Bucket="kept")
    s3.put_object(Bucket="kept", Key="k", Body=b"acknowledged")
    pids = lasting.children()
    os.kill(pids[STORAGE], signal.SIGKILL)
    wait_until(
        lambda: lasting.children().get(STORAGE) != pids[STORAGE] and lasting.health_status() == 200,
        "the storage server to serve again",
    )
    assert lasting.children()[GATEWAY] == pids[GATEWAY]
    assert s3.get_object(Bucket="kept", Key="k")["Body"].read() == b"acknowledged"
    s3.put_object(Bucket="kept", Key="k2", Body=b"again")
    s3.close()


def test_both_servers_end_when_the_supervisor_is_killed(served: Served) -> None:
    processes = [psutil.Process(pid) for pid in served.children().values()]
    assert len(processes) == 3
    served.process.kill()
    _, alive = psutil.wait_procs(processes, timeout=BOUND_S)
    assert alive == []


def test_a_start_waits_for_the_servers_of_a_supervisor_that_was_killed(served: Served) -> None:
    served.process.kill()
    served.process.wait()
    with Served(served.data_dir) as again:
        again.wait_ready()
        assert again.health_status() == 200


def test_a_second_server_on_the_same_data_is_refused_and_the_first_serves_on(
    lasting: Served, tmp_path: Path
) -> None:
    result = serve_to_its_end(tmp_path, "--data-dir", str(lasting.data_dir))
    assert result.returncode == 1
    assert result.stdout == ""
    assert f"{lasting.data_dir} is in use by another storage server" in result.stderr
    assert lasting.health_status() == 200


def test_a_port_in_use_is_a_clear_message_and_leaves_nothing_running(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = serve_to_its_end(tmp_path, "--data-dir", "data", "--listen", address)
    assert result.returncode == 1
    assert f"cannot listen on {address}" in result.stderr
    assert "in use" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--listen", "127.0.0.1:99999"], "'99999' is no port, a number from 0 to 65535"),
        (["--set", "storage.engine=tape"], "storage.engine must be local, files or memory"),
        (["--engine", "http://host"], "rados://, s3://, daos:// or file://, got 'http://host'"),
        (["--set", "scheduler.rates=forever"], "scheduler.rates must be every_epoch or for_life"),
        (["--data-dir", "file"], "it is a file; name a directory"),
        (["--set", "admin.audit_log=no/log"], "there is no directory"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_one_line_before_a_server_starts(
    tmp_path: Path, flags: list[str], words: str
) -> None:
    (tmp_path / "file").touch()
    result = serve_to_its_end(tmp_path, "--data-dir", "data", *flags)
    assert result.returncode == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("command", ["storage", "gateway", "admin serve"])
def test_a_server_alone_refuses_a_path_that_cannot_be(command: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    section = {"storage": "scheduler", "gateway": "gateway"}.get(command, "admin")
    key = {"scheduler": "profiles_dir"}.get(section, "audit_log")
    flags = ("--data-dir", "data", "--set", f"{section}.{key}=file/below")
    program = [sys.executable, "-m", "objectcache_operations", *command.split(), *flags]
    result = subprocess.run(
        program, capture_output=True, text=True, cwd=tmp_path, env=own_environment(), check=False
    )
    assert result.returncode == 2
    assert f"{section}.{key} is {tmp_path}/file/below" in result.stderr


def test_the_servers_can_be_started_each_alone(tmp_path: Path) -> None:
    with (
        started_alone("storage", tmp_path) as storage,
        started_alone("gateway", tmp_path, "--set", "gateway.listen=127.0.0.1:0") as gateway,
    ):
        for process in (gateway, storage):
            process.send_signal(signal.SIGTERM)
            assert process.wait(BOUND_S) == 0


def started_alone(command: str, directory: Path, *flags: str) -> subprocess.Popen[str]:
    """`objectcache storage` or `gateway`, once it is ready; it keeps its pid over the exec."""
    process = subprocess.Popen(
        [sys.executable, "-m", "objectcache_operations", command, "--data-dir", "data", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=directory,
        env=own_environment(),
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline().startswith(f"ready {command} ")
    except BaseException:
        process.kill()
        process.communicate()
        raise
    return process


def serve_to_its_end(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`objectcache serve` that is expected to end by itself."""
    command = [sys.executable, "-m", "objectcache_operations", "serve", "--listen", "127.0.0.1:0"]
    return subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        cwd=directory,
        env=own_environment(),
        timeout=BOUND_S,
        check=False,
    )
