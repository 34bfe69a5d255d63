"""LMCache's server, and what vLLM is told of it."""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path

from tests.servers import free_port
from tests.vllm_serve.logged_process import LoggedProcess, opened, own_environment

CHUNK_TOKENS = 64
HOST_GB = 0.5


class ServedLMCache:
    """A running server with the store behind its memory. On a CPU the engine moves the bytes."""

    def __init__(self, adapter: str, folder: Path) -> None:
        """Returns when it serves. `adapter` is its `--l2-adapter`."""
        folder.mkdir()
        self._port, http_port = free_port(), free_port()
        self._url = f"http://127.0.0.1:{http_port}"
        command = [
            *(str(Path(sys.executable).with_name("lmcache")), "server"),
            *("--host", "127.0.0.1", "--port", str(self._port)),
            *("--http-host", "127.0.0.1", "--http-port", str(http_port)),
            *("--chunk-size", str(CHUNK_TOKENS), "--l1-size-gb", str(HOST_GB)),
            *("--eviction-policy", "LRU", "--supported-transfer-mode", "engine_driven"),
            *("--disable-observability", "--l2-adapter", adapter),
        ]
        environment = own_environment(folder) | {"LMCACHE_TRACK_USAGE": "false"}
        self._process = LoggedProcess(command, environment, folder)
        self._process.wait_ready(f"{self._url}/openapi.json")

    @property
    def transfer(self) -> str:
        """vLLM's `--kv-transfer-config`."""
        document = {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": self._port,
            },
        }
        return json.dumps(document)

    @property
    def log(self) -> str:
        """All that it printed."""
        return self._process.log

    def forget(self) -> None:
        """Empty its own memory, so that what it knows must come from the store."""
        opened(urllib.request.Request(f"{self._url}/cache/clear", b"", method="POST"))

    def stop(self) -> None:
        """End it."""
        self._process.stop()
