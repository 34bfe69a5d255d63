"""A tenant who forges what NIXL says of its memory reads no other process of the server's host.

Nor does one that uses the server's own memory: it never hears of an agent of the server.
"""

from __future__ import annotations

import os
import select
import struct
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from objectcache_fabrics.nixl.agent import MemoryPiece, NixlAgent
from objectcache_schemas.descriptor import DeliveryMode, Descriptor, MemoryTarget
from objectcache_schemas.errors import ObjectCacheError, WireError
from objectcache_schemas.messages.kv import KvPut, KvStored
from objectcache_schemas.messages.reads import ObjectOpened, OpenObject, SendBody
from objectcache_schemas.messages.sessions import (
    FabricOpened,
    JoinForClient,
    NixlNames,
    OpenFabric,
    RegisterRemoteTarget,
    SessionJoined,
    TargetEvent,
    TargetRegistered,
)
from tests.servers import RunningServer, start_server
from tests.storage_client import FrameClient, StorageClient

pytest.importorskip("nixl_cu12")

LENGTH_BYTES = 16_384
SECRET = b"what-no-tenant-may-read!"
_EVENT = msgspec.msgpack.Decoder(TargetEvent)
_VICTIM = f"""
import ctypes, sys
memory = ctypes.create_string_buffer({SECRET!r} * 2000)
print(ctypes.addressof(memory), flush=True)
sys.stdin.read()
"""


@contextmanager
def victim() -> Generator[tuple[int, int]]:
    """A process of the server's user: its id, and where its secret lies."""
    with subprocess.Popen(
        [sys.executable, "-c", _VICTIM], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        try:
            yield process.pid, int(process.stdout.readline())
        finally:
            process.kill()


def may_trace() -> bool:
    """Whether a process may read another one of its user here."""
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    return os.geteuid() == 0 or not scope.exists() or scope.read_text().strip() == "0"


def attend(agent: NixlAgent, answering: FrameClient) -> None:
    """Make progress until there is an answer to read."""
    while not select.select([answering.socket], [], [], 0.001)[0]:
        agent.notifications()


def put_forged(socket_path: str, identity: str, pid: int, address: int) -> bytes:
    """Put out of another process' memory; returns what was stored. Raises what is against it."""
    own = np.zeros(LENGTH_BYTES, np.uint8)
    with StorageClient(socket_path) as session, StorageClient(socket_path) as storage:
        session.send(JoinForClient(identity=identity))
        assert isinstance(session.receive(_EVENT), SessionJoined)
        session.send(OpenFabric(transport="nixl"))
        opened = session.receive(_EVENT)
        if isinstance(opened, WireError):
            raise ObjectCacheError.from_wire(opened)
        assert isinstance(opened, FabricOpened)
        names = msgspec.msgpack.decode(opened.endpoint, type=NixlNames)
        agent = NixlAgent(names.client, "lo", "")
        try:
            metadata = agent.metadata(agent.register(MemoryPiece(own.ctypes.data, LENGTH_BYTES)))
            for mine, his in (
                (struct.pack("<I", os.getpid()), struct.pack("<I", pid)),
                (struct.pack("<Q", own.ctypes.data), struct.pack("<Q", address)),
            ):
                assert mine in metadata
                metadata = metadata.replace(mine, his)
            session.send(
                RegisterRemoteTarget(length_bytes=LENGTH_BYTES, address=address, metadata=metadata)
            )
            attend(agent, session)
            registered = session.receive(_EVENT)
            if isinstance(registered, WireError):
                raise ObjectCacheError.from_wire(registered)
            assert isinstance(registered, TargetRegistered)
            asked = MemoryTarget(
                transport="nixl",
                target_id=registered.target_id,
                offset_bytes=0,
                length_bytes=LENGTH_BYTES,
                tag=0,
            )
            shape = Descriptor(("a",), 4, 16, 4096, DeliveryMode.CHUNKWISE, rdma_target=asked)
            request = KvPut(bucket="forged", identity=identity, descriptor=shape.to_bytes())
            storage.send(request)
            attend(agent, storage)
            storage.reply(KvStored)
            return _stored(storage, identity)
        finally:
            agent.close()


def attack(server: RunningServer, pid: int, address: int) -> subprocess.CompletedProcess[bytes]:
    """The same, in a process of its own: what UCX makes of the forgery may end it."""
    arguments = [str(server.run_dir / "storage.sock"), "alice", str(pid), str(address)]
    return subprocess.run(
        [sys.executable, "-m", __name__, *arguments], capture_output=True, check=False, timeout=60
    )


def _stored(storage: StorageClient, identity: str) -> bytes:
    storage.ask(OpenObject(bucket="forged", key="a", identity=identity), ObjectOpened)
    storage.send(SendBody(offset_bytes=0, length_bytes=LENGTH_BYTES, into_socket=False))
    return storage.receive_bytes(LENGTH_BYTES)


def test_a_tenant_is_refused_the_fabric_by_which_it_would_forge_unless_storage_nixl_is_trusting(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The second half says that the forgery is one: without the rule it reads the secret."""
    with victim() as (pid, address):
        with start_server(tmp_path_factory.mktemp("auto")) as server:
            with StorageClient(server.run_dir / "storage.sock") as storage:
                storage.create_bucket("forged")
            refused = attack(server, pid, address)
            assert SECRET not in refused.stdout
            assert b"NIXL is served to the root user" in refused.stderr
        with start_server(tmp_path_factory.mktemp("trusting"), "storage.nixl=trusting") as server:
            with StorageClient(server.run_dir / "storage.sock") as storage:
                storage.create_bucket("forged")
            # A process id may occur in the metadata as something else, too: another one does not.
            attacks = (attack(server, pid, address) for _ in range(3))
            assert not may_trace() or any(SECRET in each.stdout for each in attacks)


if __name__ == "__main__":
    forged = put_forged(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    sys.stdout.buffer.write(forged)
