"""`objectcache serve --engine file:///...` as if on two hosts: each has all processes, and one
store is behind both.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

import objectcache
from objectcache_storage_server.engines.stores.open_store import create_store
from tests.certificates import Authority
from tests.integration.fleet import KEYS, ROOT, log_end_of
from tests.integration.served import Served, wait_until
from tests.integration.steady_clients import SteadyClients
from tests.integration.test_several_storage_servers import fetched, fill
from tests.servers import free_port

BODIES = [os.urandom(size_bytes) for size_bytes in (100, 4096, 300_000)]


class Host(Served):
    """One host's processes, which other hosts reach over TLS alone."""

    def __init__(self, directory: Path, name: str, authority: Authority) -> None:
        self.run_dir = Path(tempfile.mkdtemp(prefix="oc-host-", dir="/tmp"))
        pair = authority.pair(name)
        settings = [
            f"server.run_dir={self.run_dir}",
            f"server.tls_certificate={pair.certificate}",
            f"server.tls_key={pair.key}",
            f"server.tls_ca={authority.file}",
            f"storage.listen=localhost:{free_port()}",
            "admin.listen=off",
        ]
        sets = [part for one in settings for part in ("--set", one)]
        store = f"file://{directory / 'store'}"
        super().__init__(directory / name, "--engine", store, *sets, variables=KEYS)

    def kill_all(self) -> None:
        """As a host that loses its power."""
        supervisor = psutil.Process(self.process.pid)
        for process in (supervisor, *supervisor.children(recursive=True)):
            process.kill()
        self.process.wait()

    def log_end(self) -> int:
        """Of the store's log: how many records its storage server has replayed."""
        return log_end_of(self.run_dir / "storage.sock")

    def client(self) -> objectcache.Client:
        return objectcache.Client(
            self.endpoint, access_key=ROOT.access_key, secret_key=ROOT.secret_key, timeout_s=20.0
        )

    @property
    def credentials(self) -> tuple[str, str]:
        return ROOT.access_key, ROOT.secret_key


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    create_store(f"file://{tmp_path / 'store'}")
    authority = Authority(tmp_path / "tls")
    with ExitStack() as opened:
        found: list[Host] = []
        for name in ("first", "second"):
            host = Host(tmp_path, name, authority)
            opened.callback(shutil.rmtree, host.run_dir, ignore_errors=True)
            found.append(opened.enter_context(host))
            host.wait_ready()
        yield found


def test_what_one_host_stored_another_serves_and_outlives_it(hosts: list[Host]) -> None:
    first, second = hosts
    with first.client() as client:
        fill(client, first.s3())
    with second.client() as client:
        # Its gateway may ask the other one's storage server, too, as long as that serves.
        stored_end = first.log_end()
        wait_until(lambda: second.log_end() >= stored_end, "the prefix to be replayed")
        first.kill_all()
        assert all(fetched(client) for _ in range(5))


def test_a_host_that_stops_costs_clients_of_the_other_nothing(hosts: list[Host]) -> None:
    first, second = hosts
    with SteadyClients(second.s3(), BODIES) as clients:
        first.process.send_signal(signal.SIGTERM)
        assert first.wait_exit() == 0
        clients.wait_served(20)
    assert clients.errors == []
    assert set(clients.statuses) == {200}
