"""Several storage servers and gateways as processes of their own, for tests.

Over a store that they share, or each over one of its own: then what a test stores is stored in each
(`each_alone`), and every server has the same to serve.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from botocore.config import Config

import objectcache
from objectcache.channel.requests import list_servers
from objectcache.channel.responses import KvServersReply, parse_reply
from objectcache_schemas.operators.engine_status import EngineState, GetEngineStatus
from tests.certificates import Authority
from tests.integration.served import wait_until
from tests.s3_clients import boto3_client
from tests.servers import DATA_FILES, Credentials, ServerProcess, free_port, standing_still
from tests.storage_client import StorageClient

ROOT = Credentials("AKIAFLEETFLEETFLEET1", "fleet-fleet-fleet-fleet-fleet-fleet-secret")
MASTER_KEY = "TWlub3IgbWFzdGVyIGtleSBmb3IgdGVzdHMsIDMyIGI="
KEYS = {
    "OBJECTCACHE_ROOT_ACCESS_KEY": ROOT.access_key,
    "OBJECTCACHE_ROOT_SECRET_KEY": ROOT.secret_key,
    "OBJECTCACHE_MASTER_KEY": MASTER_KEY,
}


def log_end_of(storage_socket: Path) -> int:
    """Of a shared store's log: how many records the server has replayed that listens there."""
    with StorageClient(storage_socket) as client:
        shared = client.ask(GetEngineStatus(), EngineState).status.shared
    assert shared is not None, "its store is its own"
    return shared.log_end


class FleetServer:
    """One storage server, with directories of its own."""

    def __init__(self, fleet: RunningFleet, name: str) -> None:
        self.name = name
        self._fleet = fleet
        self.run_dir = fleet.run_dir / name
        self.port = free_port()
        self.process = self._started()

    @property
    def address(self) -> str:
        """How gateways reach it."""
        if self._fleet.is_tls:
            return f"localhost:{self.port}"
        return str(self.run_dir / "storage.sock")

    def _started(self) -> ServerProcess:
        settings = [f"server.run_dir={self.run_dir}", *self._fleet.settings]
        if self._fleet.is_tls:
            settings += [*self._fleet.tls_settings, f"storage.listen=localhost:{self.port}"]
        process = self._fleet.start("objectcache_storage_server", self.name, settings)
        process.wait_ready()
        return process

    def restart(self) -> None:
        """Start it again, once it has ended."""
        self.process = self._started()

    def log_end(self) -> int:
        """Of a shared store's log: how many records it has replayed."""
        return log_end_of(self.run_dir / "storage.sock")

    def has_replayed(self, end: int) -> bool:
        """Whether it knows all that is before this record."""
        return self.log_end() >= end

    def standing_still(self) -> AbstractContextManager[None]:
        """It does nothing for the length of the block."""
        return standing_still(self.process.pid)


class RunningFleet:
    """Storage servers, and gateways before all of them. Stops what it started."""

    def __init__(
        self, directory: Path, count: int, *settings: str, is_tls: bool = False, gateways: int = 1
    ) -> None:
        """`settings` are those of every process."""
        self.directory = directory
        self.is_tls = is_tls
        self.settings: Sequence[str] = (DATA_FILES, *settings)
        self.run_dir = Path(tempfile.mkdtemp(prefix="oc-fleet-", dir="/tmp"))
        self.servers: list[FleetServer] = []
        self.gateways: list[ServerProcess] = []
        self.endpoints: list[str] = []
        try:
            authority = self.authority = Authority(directory / "tls")
            pair = authority.pair("fleet")
            self.tls_settings = [
                f"server.tls_certificate={pair.certificate}",
                f"server.tls_key={pair.key}",
                f"server.tls_ca={authority.file}",
            ]
            for number in range(count):
                self.servers.append(FleetServer(self, f"storage-{number}"))
            for number in range(gateways):
                self.add_gateway(f"gateway-{number}", [one.address for one in self.servers])
        except BaseException:
            self.stop()
            raise

    @property
    def endpoint(self) -> str:
        """The first gateway's URL."""
        return self.endpoints[0]

    def add_server(self) -> FleetServer:
        """One more storage server, which no gateway was told of."""
        self.servers.append(FleetServer(self, f"storage-{len(self.servers)}"))
        return self.servers[-1]

    def add_gateway(self, name: str, addresses: Sequence[str]) -> str:
        """One more gateway, which knows these storage servers; returns its URL."""
        settings = [
            *self.settings,
            f"server.run_dir={self.run_dir / name}",
            f"gateway.storage_addresses={','.join(addresses)}",
            "gateway.listen=127.0.0.1:0",
            *(self.tls_settings if self.is_tls else ()),
        ]
        process = self.start("objectcache_gateway", name, settings)
        self.gateways.append(process)
        self.endpoints.append(process.wait_ready())
        return self.endpoints[-1]

    def wait_until_known(self) -> None:
        """Wait until every gateway knows every server. One that was told of a server alone hears
        of the others a second or two after they serve, and until then can turn to none of them.
        """
        for endpoint in self.endpoints:
            with self.client(endpoint) as client:
                wait_until(partial(self._are_known, client), f"{endpoint} to know all servers")

    def wait_until_replayed(self) -> None:
        """Wait until every server knows what any of them has acknowledged before. Until then one
        answers for a KV bucket as its store was a moment ago.
        """
        ends = [one.log_end() for one in self.servers]
        for server in self.servers:
            wait_until(partial(server.has_replayed, max(ends)), f"{server.name} to replay the log")

    def _are_known(self, client: objectcache.Client) -> bool:
        answer = client._core.channel.call(list_servers())
        return len(parse_reply(answer.body, KvServersReply, "kv-servers").servers) == len(
            self.servers
        )

    def add_admin(self) -> str:
        """An admin server before all storage servers; returns its URL."""
        settings = [
            *self.settings,
            f"server.run_dir={self.run_dir / 'admin'}",
            f"gateway.storage_addresses={','.join(one.address for one in self.servers)}",
            "admin.listen=127.0.0.1:0",
            *(self.tls_settings if self.is_tls else ()),
        ]
        (self.run_dir / "admin").mkdir()
        process = self.start("objectcache_gateway.admin", "admin", settings)
        self.gateways.append(process)
        return process.wait_ready()

    def each_alone(self, use: Callable[[objectcache.Client, Any], object]) -> None:
        """Have `use` called with clients of each storage server by itself."""
        for server in self.servers:
            endpoint = self.add_gateway(f"alone-{server.name}", [server.address])
            with self.client(endpoint) as client:
                use(client, self.s3(endpoint))
            self.gateways.pop().terminate()
            self.endpoints.pop()

    def client(
        self,
        endpoint: str = "",
        transport: str = "auto",
        timeout_s: float = 30.0,
        split_from_bytes: int = 0,
    ) -> objectcache.Client:
        """An SDK client of the root user."""
        return objectcache.Client(
            endpoint or self.endpoint,
            access_key=ROOT.access_key,
            secret_key=ROOT.secret_key,
            transport=transport,
            timeout_s=timeout_s,
            split_from_bytes=split_from_bytes,
        )

    def s3(self, endpoint: str = "", *, attempts: int = 1) -> Any:
        """A boto3 client of the root user."""
        return boto3_client(
            endpoint_url=endpoint or self.endpoint,
            aws_access_key_id=ROOT.access_key,
            aws_secret_access_key=ROOT.secret_key,
            region_name="us-east-1",
            config=Config(
                signature_version="s3v4",
                s3={"addressing_style": "path"},
                retries={"total_max_attempts": attempts},
                request_checksum_calculation="when_required",
            ),
        )

    def log(self, name: str) -> str:
        """What a process has logged."""
        return (self.directory / f"{name}.log").read_text()

    def start(
        self,
        module: str,
        name: str,
        settings: Sequence[str],
        more: Mapping[str, str] | None = None,
        within: Sequence[str] = (),
    ) -> ServerProcess:
        """Start a process, with `more` variables, `within` another place (as `ServerProcess`); the
        caller waits until it is ready.
        """
        data_dir = self.directory / name
        data_dir.mkdir(exist_ok=True, parents=True)
        arguments = ["--data-dir", str(data_dir)]
        arguments += [part for one in settings for part in ("--set", one)]
        variables = KEYS | dict(more or {})
        return ServerProcess(module, arguments, self.directory / f"{name}.log", variables, within)

    def stop(self) -> None:
        """End all, the gateways first; those of a kind at once, as a server that gateways know
        serves on for seconds.
        """
        for processes in (self.gateways, [one.process for one in self.servers]):
            running = [one for one in processes if one.returncode is None]
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGCONT)
                process.signal_stop()
            for process in running:
                process.wait_or_kill()
        shutil.rmtree(self.run_dir, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
