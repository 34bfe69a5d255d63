"""A dispatch service as a process of its own, and how to ask it."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.admin_server import Answer
from tests.servers import ServerProcess, free_port

TOKEN = "a-token-of-the-tests-alone"
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}
TIMEOUT_S = 30.0


def lasting_address() -> str:
    """Where a service can begin again: no connection takes the port while it is away."""
    return f"127.0.0.1:{free_port()}"


class DispatchProcess:
    """A service that runs; `url` is without a path."""

    def __init__(self, folder: Path, *assignments: str, listen: str = "127.0.0.1:0") -> None:
        token_file = folder / "token"
        token_file.touch(0o600)
        token_file.write_text(TOKEN + "\n")
        sets = [part for each in assignments for part in ("--set", each)]
        self.process = ServerProcess(
            "objectcache_gateway.dispatch_service",
            ["--listen", listen, "--token-file", str(token_file), *sets],
            folder / "dispatch.log",
        )
        self.url = self.process.wait_ready()

    @property
    def address(self) -> str:
        return str(urlsplit(self.url).netloc)

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        data: bytes | None = None,
        headers: dict[str, str] = AUTHORIZED,
    ) -> Answer:
        """One request on a connection of its own."""
        sent = data if body is None else json.dumps(body).encode()
        connection = http.client.HTTPConnection(self.address, timeout=TIMEOUT_S)
        try:
            connection.request(method, path, sent, headers)
            response = connection.getresponse()
            named = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, named, response.read())
        finally:
            connection.close()

    def register(self, name: str, role: str | None = None, **fields: Any) -> Answer:
        """A node with one worker NAME.0 of that role, in a group of the role's name."""
        workers = [{"name": f"{name}.0", "role": role, "group": role, "kv_capacity_tokens": 10**6}]
        figures = {"storage_nic_bytes_per_s": 1e9, "compute_nic_bytes_per_s": 1e10}
        body = {**figures, "landing_bytes": 10**11, "workers": workers if role else [], **fields}
        return self.ask("PUT", f"/v1/nodes/{name}", body)

    def select(self, name: str, **fields: Any) -> Answer:
        return self.ask("POST", "/v1/select", {**request(name), **fields})

    def loads(self, **fields: Any) -> Any:
        return self.ask("POST", "/v1/loads", fields).document

    def state(self) -> Any:
        return self.ask("GET", "/v1/state").document

    def tokens(self) -> dict[str, int]:
        """Of each worker, as the service counts them."""
        return {w["name"]: w["tok"] for node in self.state()["nodes"] for w in node["workers"]}

    def metric(self, sample: str) -> float:
        """The value of a sample, as it is written on the page; 0 where it is not there."""
        for line in self.ask("GET", "/metrics").body.decode().splitlines():
            name, _, value = line.rpartition(" ")
            if name == sample:
                return float(value)
        return 0.0


def request(name: str) -> dict[str, Any]:
    """Of 1,000 tokens, which reads 32 MB."""
    return {
        "name": name,
        "cached_tokens": 900,
        "new_tokens": 100,
        "layer_bytes": 10**6,
        "num_layers": 32,
    }
