"""NIXL's OBJ plugin as its users call it: an agent, registered memory, transfers, queries."""

from __future__ import annotations

import secrets
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from objectcache_fabrics.nixl.agent import library
from tests.servers import RunningServer

Bytes = npt.NDArray[np.uint8]
TIMEOUT_S = 60.0
REGION_BYTES = 1 << 30  # of an object, whose size NIXL does not know


class NixlError(Exception):
    """What NIXL raised."""


class NixlObj:
    """An agent with the OBJ backend on one bucket."""

    def __init__(self, server: RunningServer, bucket: str, more: Mapping[str, str]) -> None:
        """`more` are the plugin's parameters besides where the server is and who asks."""
        library()  # the process would crash at its end without it
        from nixl._api import nixl_agent, nixl_agent_config  # pyright: ignore[reportMissingImports]

        pair = server.credentials
        parameters = {
            "endpoint_override": server.endpoint,
            "scheme": server.endpoint.partition(":")[0],
            "access_key": pair.access_key,
            "secret_key": pair.secret_key,
            "bucket": bucket,
            "region": "us-east-1",
            **more,
        }
        self._name = f"agent-{secrets.token_hex(8)}"
        self._agent: Any = nixl_agent(self._name, nixl_agent_config(backends=[]))
        self._agent.create_backend("OBJ", parameters)

    def write(self, objects: Mapping[str, Bytes]) -> None:
        """Store each array as the object of that key, in one transfer."""
        self._transfer("WRITE", [(key, array, 0) for key, array in objects.items()])

    def read(self, key: str, into: Bytes, offset_bytes: int = 0) -> None:
        """Fill the array from the object. Raises `NixlError` where NIXL says that it failed."""
        self._transfer("READ", [(key, into, offset_bytes)])

    def read_many(self, reads: Sequence[tuple[str, Bytes, int]]) -> None:
        """Several in one transfer, by key, array and offset in bytes."""
        self._transfer("READ", reads)

    def is_stored(self, keys: Sequence[str]) -> list[bool]:
        """Which keys are there. Raises `NixlError` where that could not be learned."""
        asked = [(0, 0, 0, key) for key in keys]
        with _translated():
            found = self._agent.query_memory(asked, "OBJ", mem_type="OBJ")
        return [one is not None for one in found]

    def _transfer(self, operation: str, parts: Sequence[tuple[str, Bytes, int]]) -> None:
        agent = self._agent
        memory = [(array.ctypes.data, array.nbytes, 0) for _, array, _ in parts]
        local = agent.register_memory([(*one, "") for one in memory], "DRAM", ["OBJ"])
        objects = [(0, REGION_BYTES, number, key) for number, (key, _, _) in enumerate(parts)]
        remote = agent.register_memory(objects, "OBJ", ["OBJ"])
        spans = [(offset, array.nbytes, n) for n, (_, array, offset) in enumerate(parts)]
        try:
            with _translated():
                handle = agent.initialize_xfer(
                    operation,
                    agent.get_xfer_descs(memory, "DRAM"),
                    agent.get_xfer_descs(spans, "OBJ"),
                    self._name,
                )
                try:
                    self._finish(handle)
                finally:
                    agent.release_xfer_handle(handle)
        finally:
            agent.deregister_memory(remote)
            agent.deregister_memory(local)

    def _finish(self, handle: Any) -> None:
        deadline_s = time.monotonic() + TIMEOUT_S
        state = self._agent.transfer(handle)
        while state == "PROC":
            assert time.monotonic() < deadline_s, "the transfer never ended"
            state = self._agent.check_xfer_state(handle)
        assert state == "DONE", state

    def __repr__(self) -> str:
        return f"<NixlObj {self._name}>"


@contextmanager
def _translated() -> Generator[None]:
    from nixl_cu12._bindings import nixlBackendError  # pyright: ignore[reportMissingImports]

    try:
        yield
    except nixlBackendError as error:
        raise NixlError(str(error)) from error
