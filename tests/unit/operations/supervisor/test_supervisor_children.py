"""The supervisor over two small programs that keep the servers' process contract."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from objectcache_operations.supervisor.supervise import announcement

# A server: notes its pid and command line, says that it is ready, ends with standard input or
# SIGTERM. What it does on SIGTERM, and instead of becoming ready, is in its arguments.
SERVER = """
import os, signal, sys
from pathlib import Path

name, log, *options = sys.argv[1:]
def note(what):
    with open(log, "a") as file:
        file.write(f"{name} {what} {os.getpid()}\\n")
def stop(*_):
    note("stopped")
    os._exit(0)
def refuse(*_):
    note("refused to stop")
signal.signal(signal.SIGTERM, refuse if "--stubborn" in options else stop)
signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.signal(signal.SIGHUP, lambda *_: note("reloaded"))
signal.signal(signal.SIGUSR1, lambda *_: note("refused what waits"))
is_first = f"{name} started" not in Path(log).read_text()
for option in options:
    if option.startswith("--exit=") or (option.startswith("--later-exit=") and not is_first):
        sys.exit(int(option.partition("=")[2]))
if "--waits" in options:
    note("loaded")
for option in options:  # a named pipe opens when both ends do
    if option.startswith("--after="):
        open(option.partition("=")[2]).close()
    if option.startswith("--lets="):
        open(option.partition("=")[2], "w").close()
if "--waits" in options and not sys.stdin.readline():
    note("lost its supervisor")
    sys.exit()
note("started " + ",".join(options))
print("starting", flush=True)
if "--never-ready" not in options:
    print(f"ready {name} http://127.0.0.1:4242", flush=True)
sys.stdin.read()
note("lost its supervisor")
"""

SUPERVISOR = """
import asyncio, sys
from objectcache_operations.supervisor import restarts
from objectcache_operations.supervisor.child import ChildCommand
from objectcache_operations.supervisor.supervise import Commands, supervise

restarts.BACKOFF_FACTOR = 1.0
server, log, storage, gateway, other, admin, bound_s = sys.argv[1:]
def seconds(options, name):
    given = [option for option in options.split() if option.startswith(name)]
    return float(given[0].partition("=")[2]) if given else float(bound_s)
def child(name, options):
    return ChildCommand(
        name, (sys.executable, server, name, log, *options.split()), f"ready {name} ",
        seconds(options, "--drains-within="), stop_margin_s=0.3,
        ready_timeout_s=seconds(options, "--ready-within="),
        reloads="--deaf" not in options, awaits_word="--waits" in options,
    )
gateways = [child("gateway", gateway)] + ([child("other", other)] if other else [])
commands = Commands(
    child("storage", storage), tuple(gateways), child("admin", admin) if admin else None
)
sys.exit(asyncio.run(supervise(commands, lambda url: print("announced", url, flush=True))))
"""

BOUND_S = 60.0  # of all that is waited for; generous, because machines may be busy


class Supervised:
    """A supervisor in a process of its own, and the log that its children write."""

    def __init__(
        self,
        directory: Path,
        storage: str = "",
        gateway: str = "",
        other: str = "",
        admin: str = "",
    ) -> None:
        server = directory / "server.py"
        server.write_text(SERVER)
        self.log = directory / "log"
        self.log.touch()
        arguments = [str(server), str(self.log), storage, gateway, other, admin, str(10 * BOUND_S)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISOR, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def announced(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def events(self) -> list[str]:
        return [line.rpartition(" ")[0] for line in self.log.read_text().splitlines()]

    def pids(self, name: str) -> list[int]:
        lines = self.log.read_text().splitlines()
        return [int(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} start")]

    def wait_for_event(self, event: str, count: int = 1) -> None:
        wait_until(lambda: self.events().count(event) >= count, f"{count} x {event!r}")

    def end(self) -> tuple[int, str]:
        """Exit code and standard error, once it has ended by itself."""
        _, errors = self.process.communicate(timeout=BOUND_S)
        return self.process.returncode, errors

    def __enter__(self) -> "Supervised":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        for name in ("storage", "gateway", "other", "admin"):
            for pid in self.pids(name):
                wait_until(partial(has_ended, pid), f"pid {pid} to end")


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Processes that are not ours to wait for can only be asked again."""
    deadline_s = time.monotonic() + BOUND_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {BOUND_S} s for {what}"
        pause.wait(0.01)


def has_ended(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def test_storage_starts_first_and_stops_last(tmp_path: Path) -> None:
    with Supervised(tmp_path) as pair:
        assert pair.announced() == "announced None"
        pair.process.send_signal(signal.SIGTERM)
        exit_code, _ = pair.end()
        assert exit_code == 0
        events = pair.events()
        assert "storage refused what waits" in events  # before or after the gateway has stopped
        events.remove("storage refused what waits")
        assert events == [
            "storage started ",
            "gateway started ",
            "gateway stopped",
            "storage stopped",
        ]


def test_a_child_that_awaits_its_word_is_loaded_meanwhile_and_begins_after_storage(
    tmp_path: Path,
) -> None:
    met = tmp_path / "met"
    os.mkfifo(met)
    # Storage is ready only once the gateway is loaded, which then waits for the word.
    with Supervised(tmp_path, storage=f"--after={met}", gateway=f"--lets={met} --waits") as pair:
        assert pair.announced() == "announced None"
        started = [event.partition(" --")[0].strip() for event in pair.events()]
        assert started == ["gateway loaded", "storage started", "gateway started"]
        pair.process.send_signal(signal.SIGTERM)
        assert pair.end()[0] == 0


def test_a_child_that_awaits_its_word_never_begins_where_storage_fails(tmp_path: Path) -> None:
    with Supervised(tmp_path, storage="--exit=3", gateway="--waits", admin="--waits") as pair:
        exit_code, errors = pair.end()
        assert exit_code == 1
        assert "the storage exited with code 3 before it was ready" in errors
        assert not any("started" in event for event in pair.events())


def test_a_child_that_awaits_its_word_gets_it_again_when_it_is_started_again(
    tmp_path: Path,
) -> None:
    with Supervised(tmp_path, gateway="--waits") as pair:
        pair.announced()
        os.kill(pair.pids("gateway")[0], signal.SIGKILL)
        pair.wait_for_event("gateway started --waits", count=2)
        pair.process.send_signal(signal.SIGHUP)
        pair.wait_for_event("gateway started --waits", count=3)
        pair.process.send_signal(signal.SIGTERM)
        assert pair.end()[0] == 0


def test_ctrl_c_in_the_terminal_reaches_only_the_supervisor(tmp_path: Path) -> None:
    """The children would die of SIGINT without stopping in order."""
    with Supervised(tmp_path) as pair:
        pair.announced()
        groups = {os.getpgid(pid) for name in ("storage", "gateway") for pid in pair.pids(name)}
        assert os.getpgid(pair.process.pid) not in groups
        pair.process.send_signal(signal.SIGINT)
        assert pair.end()[0] == 0
        stopped = [event for event in pair.events() if event.endswith("stopped")]
        assert stopped == ["gateway stopped", "storage stopped"]


@pytest.mark.parametrize("name", ["storage", "gateway"])
def test_a_child_that_is_killed_is_started_again(tmp_path: Path, name: str) -> None:
    with Supervised(tmp_path) as pair:
        pair.announced()
        first_pid = pair.pids(name)[0]
        os.kill(first_pid, signal.SIGKILL)
        pair.wait_for_event(f"{name} started ", count=2)
        assert pair.pids(name)[1] != first_pid
        pair.process.send_signal(signal.SIGTERM)
        exit_code, errors = pair.end()
        assert exit_code == 0
        assert f"the {name} was killed by SIGKILL; starting it again in 0.2 s" in errors


def test_sighup_replaces_the_gateways_one_after_the_other_and_each_is_ready_first(
    tmp_path: Path,
) -> None:
    with Supervised(tmp_path, other="--b", admin="--c") as pair:
        assert pair.announced() == "announced http://127.0.0.1:4242"
        before = {name: pair.pids(name) for name in ("storage", "gateway", "other", "admin")}
        pair.process.send_signal(signal.SIGHUP)
        pair.wait_for_event("other stopped")
        changed = [event for event in pair.events()[4:] if not event.endswith("reloaded")]
        assert changed == [
            "gateway started ",
            "gateway stopped",
            "other started --b",
            "other stopped",
        ]
        assert [len(pair.pids(name)) for name in before] == [1, 2, 2, 1]
        pair.wait_for_event("storage reloaded")
        pair.wait_for_event("admin reloaded")
        os.kill(pair.pids("gateway")[1], signal.SIGKILL)  # the one that took over is looked after
        pair.wait_for_event("gateway started ", count=3)
        pair.process.send_signal(signal.SIGTERM)
        assert pair.end()[0] == 0


def test_a_gateway_whose_successor_cannot_start_serves_on(tmp_path: Path) -> None:
    with Supervised(tmp_path, gateway="--later-exit=2", other="--b") as pair:
        pair.announced()
        pair.process.send_signal(signal.SIGHUP)
        pair.wait_for_event("storage reloaded")
        pair.process.send_signal(signal.SIGHUP)
        pair.wait_for_event("storage reloaded", count=2)
        pair.process.send_signal(signal.SIGTERM)
        exit_code, errors = pair.end()
        assert exit_code == 0
        assert "the gateways that are left serve on as they are" in errors
        assert pair.events().count("gateway stopped") == 1
        assert "other started --b" in pair.events()


def test_a_child_that_does_not_know_sighup_is_not_sent_one(tmp_path: Path) -> None:
    with Supervised(tmp_path, admin="--deaf") as pair:
        pair.announced()
        pair.process.send_signal(signal.SIGHUP)
        pair.wait_for_event("gateway stopped")
        assert "admin reloaded" not in pair.events()
        pair.process.send_signal(signal.SIGTERM)
        assert pair.end()[0] == 0


def test_the_others_go_on_without_an_admin_server_that_keeps_dying(tmp_path: Path) -> None:
    with Supervised(tmp_path, admin="--later-exit=2") as pair:
        pair.announced()
        os.kill(pair.pids("admin")[0], signal.SIGKILL)
        pair.process.send_signal(signal.SIGHUP)
        pair.wait_for_event("gateway stopped")
        pair.process.send_signal(signal.SIGTERM)
        assert pair.end()[0] == 0


def test_a_child_that_finds_its_settings_wrong_later_ends_everything(tmp_path: Path) -> None:
    with Supervised(tmp_path, gateway="--later-exit=2") as pair:
        pair.announced()
        os.kill(pair.pids("gateway")[0], signal.SIGKILL)
        assert pair.end()[0] == 2


def test_a_child_that_keeps_dying_ends_everything_with_a_clear_message(tmp_path: Path) -> None:
    with Supervised(tmp_path, gateway="--later-exit=7") as pair:
        pair.announced()
        os.kill(pair.pids("gateway")[0], signal.SIGKILL)
        exit_code, errors = pair.end()
        assert exit_code == 1
        assert "the gateway exited with code 7; it was restarted 5 times within 60 s" in errors
        assert pair.events()[-1] == "storage stopped"


@pytest.mark.parametrize("gateway", ["--exit=2", "--exit=2 --waits"])
def test_a_child_that_finds_its_settings_wrong_is_not_started_again(
    tmp_path: Path, gateway: str
) -> None:
    with Supervised(tmp_path, gateway=gateway) as pair:
        exit_code, errors = pair.end()
        assert exit_code == 2
        assert "the gateway exited with code 2 before it was ready" in errors
        assert pair.events()[0] == "storage started "
        assert pair.events()[-1] == "storage stopped"
        assert not pair.pids("gateway")


def test_a_child_that_dies_while_it_is_first_started_ends_everything_at_once(
    tmp_path: Path,
) -> None:
    with Supervised(tmp_path, storage="--exit=1") as pair:
        exit_code, errors = pair.end()
        assert exit_code == 1
        assert "the storage server" not in errors  # the child's own name is used
        assert "the storage exited with code 1 before it was ready" in errors
        assert pair.events() == []


def test_a_child_that_never_gets_ready_is_given_up_within_the_bound(tmp_path: Path) -> None:
    with Supervised(tmp_path, gateway="--never-ready --ready-within=0.5") as pair:
        exit_code, errors = pair.end()
        assert exit_code == 1
        assert "the gateway was not ready within 0.5 s" in errors


def test_a_child_that_ignores_sigterm_is_killed_after_the_bound(tmp_path: Path) -> None:
    with Supervised(tmp_path, gateway="--stubborn --drains-within=0.2") as pair:
        pair.announced()
        pair.process.send_signal(signal.SIGTERM)
        exit_code, errors = pair.end()
        assert exit_code == 0
        assert "the gateway did not stop within 0.5 s; killing it" in errors
        assert pair.events()[-1] == "storage stopped"


def test_a_second_interrupt_kills_at_once(tmp_path: Path) -> None:
    stubborn = "--stubborn"
    with Supervised(tmp_path, stubborn, stubborn) as pair:
        pair.announced()
        pair.process.send_signal(signal.SIGINT)
        pair.wait_for_event("gateway refused to stop")
        pair.process.send_signal(signal.SIGINT)
        exit_code, errors = pair.end()
        assert exit_code == 1
        assert "interrupted again; killing all servers" in errors


def test_a_stop_while_starting_stops_what_has_started(tmp_path: Path) -> None:
    with Supervised(tmp_path, gateway="--never-ready") as pair:
        pair.wait_for_event("gateway started --never-ready")
        pair.process.send_signal(signal.SIGTERM)
        assert pair.end()[0] == 0
        assert pair.events()[-1] == "storage stopped"


def test_children_end_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    with Supervised(tmp_path) as pair:
        pair.announced()
        pair.process.kill()
        pair.wait_for_event("storage lost its supervisor")
        pair.wait_for_event("gateway lost its supervisor")


def test_what_is_announced_names_the_place_of_the_credentials_and_never_a_secret(
    tmp_path: Path,
) -> None:
    secrets = {"OBJECTCACHE_ROOT_ACCESS_KEY": "AK", "OBJECTCACHE_ROOT_SECRET_KEY": "very-secret"}
    url, admin_url = "http://127.0.0.1:9000", "http://127.0.0.1:9001"
    generated = announcement(url, admin_url, tmp_path, {})
    given = announcement(url, None, tmp_path, secrets)
    assert generated.splitlines() == [
        "ready http://127.0.0.1:9000",
        f"credentials {tmp_path}/root-credentials",
        f"data {tmp_path}",
        "admin http://127.0.0.1:9001",
    ]
    assert "admin" not in given
    assert "OBJECTCACHE_ROOT_ACCESS_KEY" in given
    assert "very-secret" not in given
