"""A storage server and its admin API as processes of their own, for tests."""

from __future__ import annotations

import http.client
import json
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from typer.testing import CliRunner, Result

from objectcache.channel.credentials_file import read_credentials
from objectcache_operations.console.app import app
from tests.servers import RUN_DIR_PARENT, ServerProcess
from tests.storage_client import StorageClient

SPACE = ("storage.capacity_bytes=134217728", "storage.data_file_bytes=67108864")
TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Answer:
    """Status, headers in lowercase, and body of one answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def document(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The code of a refusal."""
        return str(self.document["code"])


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(str(self._path))


class AdminServed:
    """A running pair: `url` over TCP, `socket_path`, and how to ask there."""

    def __init__(self, data_dir: Path, *settings: str) -> None:
        data_dir.mkdir(parents=True, exist_ok=True)
        self.data_dir = data_dir
        self._run_dir = tempfile.TemporaryDirectory(prefix="objectcache-test-", dir=RUN_DIR_PARENT)
        self.run_dir = Path(self._run_dir.name)
        named = (f"server.run_dir={self.run_dir}", "gateway.listen=127.0.0.1:0", *SPACE, *settings)
        self.flags = [
            *("--data-dir", str(data_dir)),
            *(part for one in named for part in ("--set", one)),
        ]
        self.storage = ServerProcess(
            "objectcache_storage_server", self.flags, data_dir / "storage.log"
        )
        self.storage_socket = self.storage.wait_ready()
        self.start_api()

    def start_api(self) -> None:
        """Start the admin API; it may have been stopped before."""
        self.api = ServerProcess(
            "objectcache_gateway.admin", self.flags, self.data_dir / "admin.log"
        )
        self.url = self.api.wait_ready()

    @property
    def socket_path(self) -> Path:
        """Where this host's operators ask."""
        return self.run_dir / "admin.sock"

    @property
    def root_key(self) -> tuple[str, str]:
        """Access key and secret of root."""
        return read_credentials(self.data_dir / "root-credentials")

    def ask(self, method: str, path: str, body: Any = None, *, data: bytes | None = None) -> Answer:
        """Ask over the unix socket, as this host's operator."""
        sent = data if body is None else json.dumps(body).encode()
        return _asked(UnixConnection(self.socket_path), method, path, sent, {})

    def ask_tcp(
        self, method: str, path: str, headers: dict[str, str], data: bytes | None = None
    ) -> Answer:
        """Ask over TCP, with these credentials."""
        host = urlsplit(self.url).netloc
        return _asked(
            http.client.HTTPConnection(host, timeout=TIMEOUT_S), method, path, data, headers
        )

    def token(self, *scopes: str) -> str:
        """A token with these scopes."""
        made = self.ask("POST", "/v1/tokens", {"name": "test", "scopes": list(scopes)})
        assert made.status == 201, made
        return str(made.document["token"])

    def connect(self) -> StorageClient:
        """A connection to the storage server, as a gateway has it."""
        return StorageClient(self.storage_socket)

    def admin(self, *arguments: str, text: str | None = None) -> Result:
        """`objectcache admin ...` on this server, as this host's operator."""
        where = ["--endpoint", f"unix://{self.socket_path}"]
        return CliRunner().invoke(app, ["admin", *arguments, *where], input=text)

    def printed(self, *arguments: str) -> str:
        """What a command prints that succeeds."""
        result = self.admin(*arguments)
        assert result.exit_code == 0, result.output
        return result.stdout

    def document(self, *arguments: str) -> Any:
        """What it prints with --json."""
        return json.loads(self.printed(*arguments, "--json"))

    @property
    def audit_lines(self) -> list[Any]:
        """The admin audit log."""
        text = (self.data_dir / "admin-audit.log").read_text("utf-8")
        return [json.loads(line) for line in text.splitlines()]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self.api, self.storage):
            if process.returncode is None:
                process.terminate()
        self._run_dir.cleanup()


def _asked(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    data: bytes | None,
    headers: dict[str, str],
) -> Answer:
    try:
        connection.request(method, path, data, headers)
        response = connection.getresponse()
        named = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, named, response.read())
    finally:
        connection.close()
