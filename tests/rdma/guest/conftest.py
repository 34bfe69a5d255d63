"""Ends of connections that are closed after the test, and processes that are."""

from __future__ import annotations

import multiprocessing
import subprocess
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import NamedTuple

import pytest

from objectcache_fabrics.registered_memory import RemoteMemory
from objectcache_fabrics.verbs.peer import VerbsPeer
from tests.rdma.guest.peers import Client, Server, run_client
from tests.rdma.guest.whole_server import server_on_device
from tests.servers import RunningServer


class Remote(NamedTuple):
    """A client in another process, and the server's peer for it."""

    process: BaseProcess
    pipe: Connection
    peer: VerbsPeer
    memory: RemoteMemory

    def asked(self, question: str) -> object:
        self.pipe.send(question)
        return self.pipe.recv()


# No object of verbs may cross a fork: processes come from one that has never opened a device. Each
# would import pytest, which began this one.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    ["pytest", "tests.rdma.guest.peers", "tests.rdma.guest.whole_server"]
)


@pytest.fixture
def processes() -> Iterator[Callable[..., tuple[BaseProcess, Connection]]]:
    started: list[BaseProcess] = []

    def start(target: Callable[..., None], *arguments: str) -> tuple[BaseProcess, Connection]:
        near, far = PROCESSES.Pipe()
        process = PROCESSES.Process(target=target, args=(far, *arguments), daemon=True)
        process.start()
        far.close()
        started.append(process)
        return process, near

    yield start
    for process in started:
        process.kill()
        process.join()
        process.close()


@pytest.fixture
def make_server() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def make(*arguments: object) -> Server:
        servers.append(Server(*arguments))  # type: ignore[arg-type]
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture
def make_client() -> Iterator[Callable[..., Client]]:
    clients: list[Client] = []

    def make(*arguments: object) -> Client:
        clients.append(Client(*arguments))  # type: ignore[arg-type]
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One for all: starting it takes long here. Its staging memory is one delivery's."""
    settings = ("storage.fabric_staging_bytes=8388608", "storage.fabric_timeout_s=5")
    with server_on_device(tmp_path_factory.mktemp("server") / "data", *settings) as running:
        yield running


@pytest.fixture
def make_remote(
    processes: Callable[..., tuple[BaseProcess, Connection]],
) -> Callable[[Server, str], Remote]:
    def make(server: Server, device: str) -> Remote:
        process, pipe = processes(run_client, device)
        peer, answer = server.open(pipe.recv())
        pipe.send(answer)
        return Remote(process, pipe, peer, RemoteMemory(*pipe.recv()))

    return make


@pytest.fixture
def link() -> Iterator[Callable[[str, str], None]]:
    """Take a link "down", or have it "restored"; it is, afterwards."""
    yield set_link
    for name in ("rx1", "rx2"):
        set_link(name, "restored")


def set_link(name: str, state: str) -> None:
    up_or_down = "down" if state == "down" else "up"
    subprocess.run(["ip", "link", "set", name, up_or_down], check=True, timeout=60)
    if state == "restored":  # a link's routes go with it
        near = int(name[-1])
        route = f"10.78.0.{3 - near} dev {name} src 10.78.0.{near} table 77"
        subprocess.run(["ip", "route", "replace", *route.split()], check=True, timeout=60)
