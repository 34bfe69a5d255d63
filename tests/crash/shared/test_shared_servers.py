"""Servers of one shared store that are killed, or stopped for so long that others bury them.

Each server is a process (`worker`) that stands still exactly where the story has it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from objectcache_storage_server.engines.stores.open_store import open_store
from tests.ceph import ceph_cluster, reason_to_skip
from tests.crash.shared.worker import CHUNK_BYTES, WorkerSettings
from tests.forked_servers import ForkedProcess
from tests.servers import stop_whole

WAIT_S = 60.0
WORKER = "tests.crash.shared.worker"


class Server:
    """One process."""

    def __init__(self, address: str, data: Path, settings: WorkerSettings) -> None:
        arguments = [address, str(data), msgspec.json.encode(settings).decode()]
        given, gives = os.pipe()
        self._asked = os.fdopen(gives, "wb", buffering=0)
        try:
            with (
                os.fdopen(given, "rb") as lines,
                data.with_name(f"{data.name}.log").open("ab") as log,
            ):
                self._process = ForkedProcess(WORKER, arguments, log, os.environ, lines)
        except BaseException:
            self._asked.close()
            raise
        try:
            assert self.line() == "ready"
        except BaseException:
            self.kill()
            raise

    def send(self, line: str) -> None:
        """Have it begin something."""
        self._asked.write(f"{line}\n".encode())

    def line(self) -> str:
        """Its next answer."""
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], WAIT_S)
        assert readable, "the server does not answer"
        return self._process.stdout.readline().decode().strip()

    def ask(self, line: str) -> str:
        """Have it do something, and wait for the answer."""
        self.send(line)
        return self.line()

    def do(self, line: str) -> str:
        """The same, for what must go well; returns what was answered."""
        answer = self.ask(line)
        assert answer.split()[0] == "ok", f"{line}: {answer}"
        return answer.removeprefix("ok").strip()

    def halt_in(self, operation: str, line: str, count: int = 1) -> None:
        """Have it stand still in a call of its store, in the middle of something."""
        self.do(f"halt {operation} {count}")
        self.send(line)
        assert self.line() == f"halted {operation}"

    def status(self) -> dict[str, Any]:
        """`EngineStatus`."""
        found: dict[str, Any] = json.loads(self.do("status"))
        return found

    def stop(self) -> None:
        """As a host does that stands still."""
        stop_whole(self._process.pid)

    def go_on(self) -> None:
        """After `stop`, and from where it halted."""
        os.kill(self._process.pid, signal.SIGCONT)
        self.send("go")

    def kill(self) -> None:
        """At once; a second call has no effect."""
        self._process.kill()
        self._process.wait(WAIT_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._asked.close()


class Story:
    """The servers of one store."""

    def __init__(self, address: str, folder: Path) -> None:
        self.address = address
        self.folder = folder
        self._servers: list[Server] = []

    def start(self, name: str = "", **settings: Any) -> Server:
        """A server with a data directory of its own, or with that of an earlier one."""
        data = self.folder / (name or f"data-{len(self._servers)}")
        server = Server(self.address, data, WorkerSettings(**settings))
        self._servers.append(server)
        return server

    def objects(self) -> set[str]:
        """The store's objects that hold data."""
        store = open_store(self.address)
        try:
            return {each.name for each in store.list_objects("data/", time.monotonic() + WAIT_S)}
        finally:
            store.close()

    def close(self) -> None:
        for server in self._servers:
            server.kill()


@pytest.fixture(scope="module")
def rados_address() -> Iterator[str]:
    """Of a store in a Ceph of this machine, less its namespace."""
    reason = reason_to_skip()
    if reason:
        pytest.skip(reason)
    with ceph_cluster() as cluster:
        yield f"rados://{cluster.shared_pool()}?conf={cluster.conf}&namespace="


@pytest.fixture(params=["folder", "rados"])
def story(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Story]:
    address = f"file://{tmp_path}/store"
    if request.param == "rados":
        address = request.getfixturevalue("rados_address") + uuid.uuid4().hex
    told = Story(address, tmp_path)
    try:
        yield told
    finally:
        told.close()


def until(server: Server, is_so: Callable[[], bool]) -> None:
    """Have a server do rounds of upkeep until it is so."""
    end_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end_s, "it did not come to be so"
        server.do("round")
        time.sleep(0.05)


def leads(server: Server) -> bool:
    return bool(server.status()["shared"]["leads_upkeep"])


def is_swept(server: Server) -> bool:
    """Whether the others are forgotten, and their leftovers and all that was deleted are gone."""
    shared = server.status()["shared"]
    return [shared[name] for name in ("writers", "fenced_writers", "buried_extents")] == [1, 0, 0]


def assert_whole(server: Server, *keys: str) -> None:
    """These keys are stored and no others, with the right bytes, and nothing is left over."""
    assert server.do("keys").split() == list(keys)
    for key in keys:
        assert server.do(f"read {key}") == "right"
    report = json.loads(server.do("check"))
    assert [report[name] for name in ("objects", "damaged", "misplaced", "leaked_bytes")] == [
        len(keys),
        0,
        0,
        0,
    ]


def test_killed_between_the_data_and_the_record(story: Story) -> None:
    server, other = story.start(), story.start()
    server.do("put acknowledged")
    server.halt_in("append", "put lost")
    assert len(story.objects()) == 2
    server.kill()
    until(other, lambda: is_swept(other))
    assert_whole(other, "acknowledged")
    assert len(story.objects()) == 1


def test_killed_while_it_writes_a_checkpoint(story: Story) -> None:
    server = story.start("a", checkpoint_records=3)
    for number in range(5):
        server.do(f"put {number}")
    until(server, lambda: bool(server.status()["shared"]["checkpoint"]))
    for number in range(5, 10):
        server.do(f"put {number}")
    server.halt_in("put", "round")
    server.kill()
    keys = [f"{number}" for number in range(10)]
    again, fresh = story.start("a", checkpoint_records=3), story.start(checkpoint_records=3)
    assert_whole(again, *keys)
    assert_whole(fresh, *keys)
    before = again.status()["shared"]["checkpoint"]
    until(again, lambda: again.status()["shared"]["checkpoint"] > before)
    assert_whole(story.start(), *keys)


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "stopped"])
def test_an_evictor_that_ends_or_stands_still_before_its_record(
    story: Story, is_killed: bool
) -> None:
    server = story.start(capacity_bytes=16 * CHUNK_BYTES)
    other = story.start()
    until(server, lambda: leads(server))
    for number in range(13):
        server.do(f"put {number:02}")
    server.halt_in("append", "round")
    keys = [f"{number:02}" for number in range(13)]
    if is_killed:
        server.kill()
    else:
        server.stop()
    until(other, lambda: leads(other))
    assert_whole(other, *keys)
    if not is_killed:
        server.go_on()
        assert server.line().startswith("ok")  # the round goes on, without the lease
        assert_whole(server, *keys)
        assert server.status()["evicted_objects"] == 0
        other.do("put 13")
    third = story.start(capacity_bytes=16 * CHUNK_BYTES)
    other.kill()
    until(third, lambda: leads(third) and third.status()["evicted_objects"] > 0)
    assert len(third.do("keys").split()) == 8


@pytest.mark.parametrize("operation", ["delete", "append"])
@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "stopped"])
def test_a_server_that_ends_or_stands_still_in_the_graveyard(
    story: Story, operation: str, is_killed: bool
) -> None:
    server, other = story.start(), story.start()
    until(server, lambda: leads(server))
    for key in ("a", "b", "kept"):
        server.do(f"put {key}")
    server.do("delete a")
    server.do("delete b")
    server.do("round")
    time.sleep(1.2)  # the grace, of which no round before may have taken anything away
    server.halt_in(operation, "round")
    if is_killed:
        server.kill()
    else:
        server.stop()
    until(other, lambda: is_swept(other))
    assert len(story.objects()) == 1
    assert_whole(other, "kept")
    if not is_killed:
        other.do("put new")
        server.go_on()
        assert server.line().startswith("ok")
        assert_whole(server, "kept", "new")
        assert_whole(other, "kept", "new")


def test_an_old_writer_that_wakes_up_is_refused_and_goes_on(story: Story) -> None:
    server, other = story.start(), story.start()
    server.do("put acknowledged")
    server.halt_in("append", "put staged")
    server.stop()
    until(other, lambda: is_swept(other))
    assert len(story.objects()) == 1
    other.do("put meanwhile")
    server.go_on()
    assert server.line() == "error Unavailable"
    assert_whole(server, "acknowledged", "meanwhile")
    server.do("put again")
    assert_whole(other, "acknowledged", "again", "meanwhile")


def test_an_old_writer_whose_data_comes_after_its_funeral_leaves_nothing(story: Story) -> None:
    server, other = story.start(), story.start()
    server.do("put acknowledged")
    server.halt_in("put", "put late")
    server.stop()
    until(other, lambda: is_swept(other))
    server.go_on()
    assert server.line() == "error Unavailable"
    end_s = time.monotonic() + WAIT_S
    while len(story.objects()) > 1:
        assert time.monotonic() < end_s, "what was put late stays"
        time.sleep(0.05)
    assert_whole(other, "acknowledged")


def test_an_old_reader_that_wakes_up_follows(story: Story) -> None:
    server, other = story.start(), story.start()
    other.do("put deleted")
    other.do("put kept")
    server.do("hold deleted")
    server.stop()
    other.do("delete deleted")
    until(other, lambda: is_swept(other))
    server.go_on()
    assert server.ask("read-held") == "error NotFound"
    assert server.ask("read deleted") == "error NotFound"
    assert_whole(server, "kept")
    assert server.status()["damaged"] == 0
    server.do("put new")
    assert_whole(other, "kept", "new")
