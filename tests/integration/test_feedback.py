"""Consumption goes from the SDK to a real storage server: into its sessions, and by descriptor."""

from __future__ import annotations

import asyncio
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from objectcache import AsyncClient, Client, KvLayout
from objectcache.channel.responses import SessionReply
from objectcache.deliveries.feedback import tell_session
from objectcache.deliveries.layer_progress import LayerProgress
from objectcache.kv_bucket import KvBucket
from objectcache.sessions.target_session import TargetSession, own_host_id
from objectcache_runtime.networking.stream_socket import StreamSocket
from objectcache_runtime.settings import StorageSettings
from objectcache_schemas.messages.sessions import LayersConsumed
from objectcache_storage_server.conversations.sessions import Session, SessionServer
from objectcache_storage_server.conversations.tickets import TicketBook
from objectcache_storage_server.transports.fabrics import Fabrics
from objectcache_storage_server.transports.targets import TargetRegistry
from tests.servers import RunningServer

LAYOUT = KvLayout(
    num_layers=5, chunk_tokens=16, per_layer_chunk_bytes=4096, dtype="float16", fingerprint="told"
)
BOUND_S = 30.0


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[Client]:
    keys = server.credentials
    with Client(server.endpoint, access_key=keys.access_key, secret_key=keys.secret_key) as client:
        yield client


def stored_prefix(client: Client, chunk_count: int) -> tuple[KvBucket, list[str], Any]:
    bucket = client.kv_bucket(f"feedback-{secrets.token_hex(6)}", LAYOUT, create=True)
    shape = (chunk_count, LAYOUT.num_layers, LAYOUT.per_layer_chunk_bytes)
    chunks = np.random.default_rng(chunk_count).integers(0, 256, shape, dtype=np.uint8)
    keys = bucket.chunk_keys(np.arange(chunk_count * LAYOUT.chunk_tokens))
    assert bucket.put(keys, chunks).stored == chunk_count
    return bucket, keys, chunks


@pytest.mark.parametrize("delivery", ["layerwise", "chunkwise"])
@pytest.mark.parametrize("by_itself", [False, True])
def test_deliveries_that_tell_share_one_session_and_keep_their_bytes(
    client: Client, delivery: str, by_itself: bool
) -> None:
    bucket, keys, chunks = stored_prefix(client, 40)
    session = client._core.shared.sessions.session()
    for _ in range(3):
        with bucket.fetch(keys, delivery=delivery, transport="shared_memory") as running:
            if by_itself:
                running.report_explicitly()
            for layer, kv in running:
                assert np.array_equal(kv, chunks[:, layer])
                if by_itself:
                    running.consumed(layer, 0.001)
        assert re.fullmatch("[0-9A-F]{16}", running.request_id)
    assert client._core.shared.sessions.session() is session  # no word of it cost the session


@pytest.mark.asyncio
async def test_an_asynchronous_engine_tells_too(server: RunningServer, client: Client) -> None:
    bucket, keys, chunks = await asyncio.to_thread(stored_prefix, client, 40)
    pair = server.credentials
    async with AsyncClient(
        server.endpoint, access_key=pair.access_key, secret_key=pair.secret_key
    ) as asynchronous:
        fetched = await asynchronous.kv_bucket(bucket.name, LAYOUT)
        async with fetched.fetch(keys, transport="shared_memory") as delivery:
            async for layer, kv in delivery:
                assert np.array_equal(kv, chunks[:, layer])
        session = asynchronous._client._core.shared.sessions.session()
        async with fetched.fetch(keys, transport="shared_memory") as delivery:
            await delivery.wait()
        assert asynchronous._client._core.shared.sessions.session() is session


def test_hints_are_taken_and_a_window_that_was_learned_is_the_descriptors(client: Client) -> None:
    bucket, keys, chunks = stored_prefix(client, 40)
    for number in range(2):
        with bucket.fetch(keys, transport="body", context_tokens=1000) as delivery:
            for layer, kv in delivery:
                assert np.array_equal(kv, chunks[:, layer])
                delivery.consumed(layer, 0.002)
        assert delivery.window_source in (None, ("none", "descriptor")[number])
    with bucket.fetch(keys, rate_bytes_per_s=1e12, path="agg") as delivery:
        assert np.array_equal(delivery.wait(), chunks.transpose(1, 0, 2))


class ServedSessions:
    """A target socket in this process, whose sessions a test can see."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tickets = TicketBook()
        self.server = SessionServer(
            TargetRegistry(1 << 20),
            Fabrics(StorageSettings()),
            self.tickets,
            StorageSettings(sessions_max=4),
        )
        self.listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listening.bind(str(path))
        self.listening.listen()
        self.listening.setblocking(False)

    def invitation(self) -> SessionReply:
        ticket = self.tickets.issue("alice", time.monotonic())
        return SessionReply(
            v=1, ticket=ticket, socket_path=str(self.path), host_id=own_host_id(), expires_s=30.0
        )

    async def serve_one(self) -> None:
        accepted, _ = await asyncio.get_running_loop().sock_accept(self.listening)
        stream = StreamSocket(accepted)
        try:
            await self.server.serve(stream, lambda: None)
        finally:
            stream.close()

    @property
    def session(self) -> Session:
        (session,) = self.server._sessions
        return session


@pytest.mark.asyncio
async def test_what_the_sdk_tells_is_what_the_servers_session_hears(tmp_path: Path) -> None:
    served = ServedSessions(tmp_path / "targets.sock")
    serving = asyncio.create_task(served.serve_one())
    joined = await asyncio.to_thread(TargetSession.join, served.invitation(), BOUND_S)
    messages: list[LayersConsumed] = []
    all_heard = asyncio.Event()

    def hear(message: LayersConsumed) -> None:
        messages.append(message)
        if message.end_layer == 6:
            all_heard.set()

    progress = LayerProgress(2, 6)
    tag = joined.listen(progress)
    served.session.watch_consumption(tag, hear)
    progress.advance(6)

    def engine() -> None:
        reports = tell_session(progress, joined, tag, layer_bytes=0)
        for layer in range(2, 6):
            reports.wait_begins(layer)
            reports.wait_ended(layer)
        reports.close()

    await asyncio.to_thread(engine)
    async with asyncio.timeout(BOUND_S):
        await all_heard.wait()
    assert [message.end_layer for message in messages] == [3, 4, 5, 6]
    assert {message.tag for message in messages} == {tag}
    assert all(0 <= message.compute_s < BOUND_S for message in messages)
    await asyncio.to_thread(joined.close)
    await serving
    served.listening.close()


@pytest.mark.asyncio
async def test_an_engine_is_not_held_up_by_a_server_that_stands_still(tmp_path: Path) -> None:
    served = ServedSessions(tmp_path / "targets.sock")
    serving = asyncio.create_task(served.serve_one())
    joined = await asyncio.to_thread(TargetSession.join, served.invitation(), BOUND_S)
    told = [LayersConsumed(tag=1, end_layer=layer, compute_s=0.0) for layer in range(20_000)]
    done = threading.Event()

    def engine() -> None:
        for message in told:
            joined.tell(message)
        done.set()

    thread = threading.Thread(target=engine)
    thread.start()
    assert done.wait(BOUND_S)  # while the event loop that would read it stands still: here
    thread.join()
    await asyncio.to_thread(joined.close)
    await serving
    served.listening.close()
