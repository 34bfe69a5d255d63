"""Sessions on the target socket that end in the middle of something."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest

from objectcache_fabrics.peers import FabricPeer
from objectcache_runtime.networking.stream_socket import StreamSocket
from objectcache_runtime.settings import StorageSettings
from objectcache_schemas.errors import AccessDenied, DeliveryFailed, WireError
from objectcache_schemas.messages.frames import LENGTH, encode_frame
from objectcache_schemas.messages.message import PROTOCOL_VERSION
from objectcache_schemas.messages.sessions import (
    CancelGet,
    DeliveryFailure,
    FabricOpened,
    GetEnded,
    GetPrefix,
    JoinSession,
    LayersAwaited,
    LayersConsumed,
    LayersReady,
    OpenFabric,
    RegisterTarget,
    SessionJoined,
    SessionPing,
    SessionPong,
    TargetEvent,
    TargetRegistered,
)
from objectcache_storage_server.conversations.sessions import (
    COMPUTE_S_MAX,
    CONSUMPTIONS_WATCHED_MAX,
    GETS_MAX,
    UNSENT_BYTES_MAX,
    Session,
    SessionServer,
)
from objectcache_storage_server.conversations.tickets import TicketBook
from objectcache_storage_server.transports.fabrics import Fabrics
from objectcache_storage_server.transports.targets import (
    RegisteredTarget,
    TargetOwner,
    TargetRegistry,
)
from tests.storage_client import sealed_memory_file
from tests.unit.fabrics.held_peer import HeldPeer

DEADLINE_S = 20.0
LENGTH_BYTES = 1 << 16
_EVENT: msgspec.msgpack.Decoder[TargetEvent] = msgspec.msgpack.Decoder(TargetEvent)


class GatedRegistry(TargetRegistry):
    """Registers a target only when `gate` is set, and tells whose session asked."""

    def __init__(self) -> None:
        super().__init__(1 << 30)
        self.registering, self.gate = threading.Event(), threading.Event()
        self.session: Session | None = None

    def register(self, owner: TargetOwner, descriptor: int, length_bytes: int) -> RegisteredTarget:
        assert isinstance(owner, Session)
        self.session = owner
        self.registering.set()
        assert self.gate.wait(DEADLINE_S)
        return super().register(owner, descriptor, length_bytes)


class Joined:
    """A client's end of a session that is being served."""

    def __init__(self, settings: StorageSettings | None = None) -> None:
        self.registry = GatedRegistry()
        tickets = TicketBook()
        self.client, near = socket.socketpair()
        self.client.settimeout(DEADLINE_S)
        self.stream = StreamSocket(near)
        storage = settings or StorageSettings(sessions_max=1)
        self.server = SessionServer(self.registry, Fabrics(storage), tickets, storage)
        self.serving = asyncio.create_task(self.server.serve(self.stream, lambda: None))
        ticket = tickets.issue("alice", time.monotonic())
        self.client.sendall(encode_frame(JoinSession(v=PROTOCOL_VERSION, ticket=ticket)))

    def event(self) -> TargetEvent:
        """The next message to the client."""
        (length,) = LENGTH.unpack(self.client.recv(LENGTH.size, socket.MSG_WAITALL))
        return _EVENT.decode(self.client.recv(length, socket.MSG_WAITALL))

    async def register(self) -> Session:
        """Have the server stand in the middle of a registration; returns its session."""
        assert isinstance(await asyncio.to_thread(self.event), SessionJoined)
        descriptor = sealed_memory_file(LENGTH_BYTES)
        frame = encode_frame(RegisterTarget(length_bytes=LENGTH_BYTES))
        socket.send_fds(self.client, [frame], [descriptor])
        os.close(descriptor)
        assert await asyncio.to_thread(self.registry.registering.wait, DEADLINE_S)
        assert self.registry.session is not None
        return self.registry.session


@asynccontextmanager
async def joined(settings: StorageSettings | None = None) -> AsyncGenerator[Joined]:
    session = Joined(settings)
    try:
        yield session
    finally:
        session.registry.gate.set()
        session.client.close()
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(session.serving, return_exceptions=True)
        session.stream.close()


async def turns_of_the_loop() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def hang_up(client: Joined, session: Session) -> None:
    client.client.close()
    session.post(LayersReady(tag=0, end_layer=1))  # which finds that out


def stop_the_server(client: Joined, session: Session) -> None:
    client.serving.cancel()


@pytest.mark.asyncio
@pytest.mark.parametrize("end", [hang_up, stop_the_server])
async def test_a_target_whose_session_ends_during_its_registration_is_let_go(
    end: Callable[[Joined, Session], None],
) -> None:
    async with joined() as client:
        session = await client.register()
        end(client, session)
        await turns_of_the_loop()
        assert not client.serving.done()  # its thread still maps the memory
        assert client.server.open_count == 1
        client.registry.gate.set()
        await asyncio.wait([client.serving])
        assert client.server.open_count == 0
        assert repr(client.registry) == "<TargetRegistry 0 targets>"
        assert session.targets == {}


@pytest.mark.asyncio
async def test_a_session_is_spared_what_its_client_does_not_wait_for() -> None:
    async with joined() as client:
        session = await client.register()
        client.registry.gate.set()
        registered = await asyncio.to_thread(client.event)
        assert isinstance(registered, TargetRegistered)
        assert registered.hears_awaited
        for tag, interval_s in ((3, 10.0), (4, math.nan), (5, -1.0)):
            awaited = LayersAwaited(tag=tag, end_layer=3, interval_s=interval_s)
            client.client.sendall(encode_frame(awaited))
        client.client.sendall(encode_frame(SessionPing()))
        assert isinstance(await asyncio.to_thread(client.event), SessionPong)
        events = [LayersReady(tag=tag, end_layer=end) for tag in (3, 4, 5) for end in (1, 2, 3)]
        for event in events:
            session.post(event)
        heard = [await asyncio.to_thread(client.event) for _ in events[2:]]
        assert heard == events[2:], "of tag 3 the last alone; of numbers that are none everything"


@pytest.mark.asyncio
async def test_a_client_hears_by_the_interval_what_it_was_spared_though_nothing_more_comes() -> (
    None
):
    async with joined() as client:
        session = await client.register()
        client.registry.gate.set()
        await asyncio.to_thread(client.event)
        for end_layer, interval_s in ((1, 10.0), (2, 0.05), (3, 0.05)):
            awaited = LayersAwaited(tag=3, end_layer=9, interval_s=interval_s)
            client.client.sendall(encode_frame(awaited) + encode_frame(SessionPing()))
            while not isinstance(await asyncio.to_thread(client.event), SessionPong):
                pass
            session.post(LayersReady(tag=3, end_layer=end_layer))
        # Where the intervals pass before the last is posted, those before it are told as well.
        while (event := await asyncio.to_thread(client.event)) != LayersReady(tag=3, end_layer=3):
            assert event in [LayersReady(tag=3, end_layer=end_layer) for end_layer in (1, 2)]


@pytest.mark.asyncio
async def test_a_tenant_has_its_share_of_storage_sessions_max_and_root_and_others_the_rest() -> (
    None
):
    """storage.sessions_max"""
    tickets = TicketBook()
    server = SessionServer(
        TargetRegistry(1 << 20),
        Fabrics(StorageSettings()),
        tickets,
        StorageSettings(sessions_max=6),
    )
    ends: list[tuple[socket.socket, StreamSocket, asyncio.Task[None]]] = []

    async def answer(identity: str) -> TargetEvent:
        client, near = socket.socketpair()
        client.settimeout(DEADLINE_S)
        stream = StreamSocket(near)
        ends.append((client, stream, asyncio.create_task(server.serve(stream, lambda: None))))
        ticket = tickets.issue(identity, time.monotonic())
        client.sendall(encode_frame(JoinSession(v=PROTOCOL_VERSION, ticket=ticket)))
        frame = await asyncio.to_thread(client.recv, 1 << 16)
        return _EVENT.decode(frame[LENGTH.size :])

    try:
        for _ in range(4):
            assert isinstance(await answer("alice"), SessionJoined)
        refused = await answer("alice")
        assert isinstance(refused, WireError)
        assert refused.code == "SlowDown"
        assert "4 of them of this user; storage.sessions_max is 6" in refused.message
        assert isinstance(await answer("bob"), SessionJoined)
        ends[0][0].close()
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.wait([ends[0][2]])
        for _ in range(2):
            assert isinstance(await answer("root"), SessionJoined)
        assert "6 sessions are open" in str(await answer("root"))
    finally:
        for client, stream, serving in ends:
            client.close()
            await asyncio.gather(serving, return_exceptions=True)
            stream.close()


@pytest.mark.asyncio
async def test_a_session_ends_with_the_first_fabric_that_could_not_be_opened() -> None:
    async with joined(StorageSettings(verbs_device="nosuch0")) as client:
        assert isinstance(await asyncio.to_thread(client.event), SessionJoined)
        ask = encode_frame(OpenFabric(transport="verbs"))
        client.client.sendall(ask + ask)
        refusal = await asyncio.to_thread(client.event)
        assert isinstance(refusal, WireError)
        assert refusal.code == "ServiceUnavailable"
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.wait([client.serving])
        client.stream.close()
        with pytest.raises(ConnectionResetError):  # the second was never read
            client.client.recv(1)


@pytest.mark.asyncio
async def test_a_fabric_that_is_not_served_leaves_the_session_as_it_is() -> None:
    async with joined(StorageSettings(nixl="off")) as client:
        assert isinstance(await asyncio.to_thread(client.event), SessionJoined)
        for _ in range(2):
            client.client.sendall(encode_frame(OpenFabric(transport="nixl")))
            refusal = await asyncio.to_thread(client.event)
            assert isinstance(refusal, WireError)
            assert "storage.nixl is off" in refusal.message
        assert not client.serving.done()


class OpenedFabrics(Fabrics):
    """Every fabric opens, without a library."""

    def open(self, transport: str, endpoint: bytes, identity: str) -> tuple[FabricPeer, bytes]:
        if endpoint == b"refused":
            raise AccessDenied("not to this one")
        return HeldPeer(LENGTH_BYTES), b""


@pytest.mark.asyncio
async def test_a_tenants_first_session_ends_the_youngest_of_whoever_has_most() -> None:
    """storage.sessions_max"""
    tickets = TicketBook()
    storage = StorageSettings(sessions_max=4)
    server = SessionServer(TargetRegistry(1 << 20), Fabrics(storage), tickets, storage)
    ends: list[tuple[socket.socket, StreamSocket, asyncio.Task[None]]] = []

    async def answer(identity: str) -> TargetEvent:
        client, near = socket.socketpair()
        client.settimeout(DEADLINE_S)
        stream = StreamSocket(near)
        ends.append((client, stream, asyncio.create_task(server.serve(stream, lambda: None))))
        ticket = tickets.issue(identity, time.monotonic())
        client.sendall(encode_frame(JoinSession(v=PROTOCOL_VERSION, ticket=ticket)))
        frame = await asyncio.to_thread(client.recv, 1 << 16)
        return _EVENT.decode(frame[LENGTH.size :])

    try:
        for identity in ("root", "greedy", "greedy", "other"):
            assert isinstance(await answer(identity), SessionJoined)
        assert isinstance(await answer("new"), SessionJoined)
        async with asyncio.timeout(DEADLINE_S):
            await ends[2][2]  # the second of greedy's
        assert not any(serving.done() for _, _, serving in (*ends[:2], *ends[3:]))
        for identity in ("new", "late"):  # it has one already; nobody has several
            assert isinstance(await answer(identity), WireError)
    finally:
        for client, stream, serving in ends:
            client.close()
            await asyncio.gather(serving, return_exceptions=True)
            stream.close()


@pytest.mark.asyncio
async def test_sessions_over_nixl_are_bounded_and_a_tenant_leaves_some_to_others() -> None:
    """storage.nixl_sessions_max; other fabrics do not count, nor does what was not opened."""
    storage = StorageSettings(nixl_sessions_max=4)
    tickets = TicketBook()
    server = SessionServer(TargetRegistry(1 << 20), OpenedFabrics(storage), tickets, storage)
    ends: list[tuple[socket.socket, StreamSocket, asyncio.Task[None]]] = []

    async def answer(identity: str, transport: str = "nixl", endpoint: bytes = b"") -> TargetEvent:
        client, near = socket.socketpair()
        client.settimeout(DEADLINE_S)
        stream = StreamSocket(near)
        ends.append((client, stream, asyncio.create_task(server.serve(stream, lambda: None))))
        ticket = tickets.issue(identity, time.monotonic())
        client.sendall(encode_frame(JoinSession(v=PROTOCOL_VERSION, ticket=ticket)))
        await asyncio.to_thread(client.recv, 1 << 16)
        client.sendall(encode_frame(OpenFabric(transport=transport, endpoint=endpoint)))
        frame = await asyncio.to_thread(client.recv, 1 << 16)
        return _EVENT.decode(frame[LENGTH.size :])

    try:
        for _ in range(3):
            assert isinstance(await answer("alice"), FabricOpened)
        refused = await answer("alice")
        assert isinstance(refused, WireError)
        assert refused.code == "SlowDown"
        assert "3 of them of this user; storage.nixl_sessions_max is 4" in refused.message
        assert isinstance(await answer("alice", "verbs"), FabricOpened)
        for _ in range(3):
            assert isinstance(await answer("bob", endpoint=b"refused"), WireError)
        assert isinstance(await answer("root"), FabricOpened)
        assert "4 sessions over NIXL are open" in str(await answer("root"))
        ends[0][0].close()
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.wait([ends[0][2]])
        assert isinstance(await answer("bob"), FabricOpened)
    finally:
        for client, stream, serving in ends:
            client.close()
            await asyncio.gather(serving, return_exceptions=True)
            stream.close()


def events(count: int) -> list[LayersReady]:
    return [LayersReady(tag=tag, end_layer=1) for tag in range(count)]


@pytest.mark.asyncio
async def test_events_that_a_client_takes_late_come_whole_and_in_order() -> None:
    posted = events(5000)  # more than the socket holds
    async with joined() as client:
        session = await client.register()
        for event in posted:
            session.post(event)
        taken = [await asyncio.to_thread(client.event) for _ in posted]
        assert taken == posted


@pytest.mark.asyncio
async def test_a_session_that_ends_before_its_events_were_taken_leaves_no_task_behind() -> None:
    async with joined() as client:
        session = await client.register()
        for event in events(5000):
            session.post(event)
        await turns_of_the_loop()
        client.registry.gate.set()
        client.client.shutdown(socket.SHUT_WR)  # it says no more, and reads nothing either
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.wait([client.serving])
        assert asyncio.all_tasks() - {client.serving} == {asyncio.current_task()}


@pytest.mark.asyncio
async def test_a_client_too_far_behind_its_events_is_gone() -> None:
    async with joined() as client:
        session = await client.register()
        client.registry.gate.set()
        error = DeliveryFailed("x" * 60_000).to_wire()
        for _ in range(2 * UNSENT_BYTES_MAX // 60_000):
            session.post(DeliveryFailure(tag=0, failed_layer=0, error=error))
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.wait([client.serving])
        assert client.serving.exception() is None
        assert repr(client.registry) == "<TargetRegistry 0 targets>"


def get_of(tag: int) -> bytes:
    return encode_frame(GetPrefix(tag=tag, bucket="kv", descriptor=b"", request_id="r"))


@pytest.mark.asyncio
async def test_gets_of_one_session_are_bounded_and_end_with_it() -> None:
    running: dict[int, asyncio.Event] = {}

    async def serve_get(session: Session, get: GetPrefix, cancelled: asyncio.Event) -> None:
        running[get.tag] = cancelled
        await cancelled.wait()
        session.post(GetEnded(tag=get.tag))

    async with joined() as client:
        client.server.serve_get = serve_get
        assert isinstance(await asyncio.to_thread(client.event), SessionJoined)
        client.client.sendall(b"".join(get_of(tag) for tag in range(GETS_MAX + 1)))
        refused = await asyncio.to_thread(client.event)
        assert isinstance(refused, GetEnded)
        assert refused.error is not None
        assert (refused.tag, refused.error.code) == (GETS_MAX, "SlowDown")
        client.client.sendall(encode_frame(CancelGet(tag=5)))
        assert await asyncio.to_thread(client.event) == GetEnded(tag=5)
        client.client.sendall(get_of(5))  # there is room again
        client.client.close()
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.wait([client.serving])
            await asyncio.gather(*client.server.gets)
        assert len(running) == GETS_MAX
        assert all(cancelled.is_set() for cancelled in running.values())


@pytest.mark.asyncio
async def test_a_session_whose_server_serves_no_gets_is_told_to_ask_over_http() -> None:
    async with joined() as client:
        assert isinstance(await asyncio.to_thread(client.event), SessionJoined)
        client.client.sendall(get_of(1))
        refused = await asyncio.to_thread(client.event)
        assert isinstance(refused, GetEnded)
        assert refused.error is not None
        assert refused.error.code == "AccessDenied"


def consumed(tag: int, end_layer: int, compute_s: float = 0.25) -> LayersConsumed:
    return LayersConsumed(tag=tag, end_layer=end_layer, compute_s=compute_s)


class Heard:
    """Collects what a session says that it consumed, and when so much has come."""

    def __init__(self) -> None:
        self.messages: list[LayersConsumed] = []
        self.threads: set[int] = set()
        self._changed = asyncio.Event()

    def __call__(self, message: LayersConsumed) -> None:
        self.messages.append(message)
        self.threads.add(threading.get_ident())
        self._changed.set()

    async def until(self, message: LayersConsumed) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while message not in self.messages:
                await self._changed.wait()
                self._changed.clear()


@pytest.mark.asyncio
async def test_feedback_reaches_whoever_watches_its_delivery_and_nobody_else() -> None:
    async with joined() as client:
        session = await client.register()
        client.registry.gate.set()
        first, second = Heard(), Heard()
        await asyncio.to_thread(session.watch_consumption, 1, first)
        session.watch_consumption(2, second)
        sent = [consumed(1, 1), consumed(3, 9), consumed(2, 5, 0.5), consumed(1, 2)]
        client.client.sendall(b"".join([encode_frame(message) for message in sent]))
        await first.until(sent[-1])
        assert (first.messages, second.messages) == ([sent[0], sent[3]], [sent[2]])
        assert first.threads == {threading.get_ident()}  # the event loop's


@pytest.mark.asyncio
async def test_feedback_of_a_delivery_that_has_ended_is_ignored() -> None:
    async with joined() as client:
        session = await client.register()
        client.registry.gate.set()
        ended, running = Heard(), Heard()
        session.watch_consumption(1, ended)
        session.watch_consumption(2, running)
        session.forget_consumption(1, running)  # which does not watch it
        session.watch_consumption(3, ended)
        for _ in range(2):
            session.forget_consumption(1, ended)
        client.client.sendall(encode_frame(consumed(1, 1)) + encode_frame(consumed(2, 1)))
        await running.until(consumed(2, 1))
        assert ended.messages == []
        client.client.sendall(encode_frame(consumed(3, 1)))
        await ended.until(consumed(3, 1))


@pytest.mark.asyncio
async def test_feedback_that_makes_no_sense_is_ignored_and_costs_nothing() -> None:
    async with joined() as client:
        session = await client.register()
        client.registry.gate.set()
        heard = Heard()
        session.watch_consumption(1, heard)
        nonsense = [
            consumed(1, -1),
            consumed(1, 1, -0.001),
            consumed(1, 1, math.nan),
            consumed(1, 1, math.inf),
            consumed(1, 1, COMPUTE_S_MAX * 1.001),
            consumed(-1, 1),
        ]
        bounds = [consumed(1, 0, 0.0), consumed(1, 1, COMPUTE_S_MAX)]
        frames = [encode_frame(message) for message in [*nonsense, *bounds]]
        client.client.sendall(b"".join(frames))
        await heard.until(bounds[-1])
        assert heard.messages == bounds
        assert not client.serving.done()


@pytest.mark.asyncio
async def test_a_session_watches_a_bounded_number_of_deliveries() -> None:
    async with joined() as client:
        session = await client.register()
        client.registry.gate.set()
        past, last = Heard(), Heard()
        for tag in range(CONSUMPTIONS_WATCHED_MAX - 1):
            session.watch_consumption(tag, past)
        session.watch_consumption(CONSUMPTIONS_WATCHED_MAX - 1, last)
        session.watch_consumption(CONSUMPTIONS_WATCHED_MAX, past)
        over, within = (
            consumed(CONSUMPTIONS_WATCHED_MAX, 1),
            consumed(CONSUMPTIONS_WATCHED_MAX - 1, 1),
        )
        client.client.sendall(encode_frame(over) + encode_frame(within))
        await last.until(within)
        assert past.messages == []


@pytest.mark.asyncio
async def test_a_delivery_after_as_many_as_are_watched_is_watched_too() -> None:
    class Get:
        """A delivery that hears by a method, which is another object each time it is named."""

        def consumed(self, message: LayersConsumed) -> None:
            pass

    async with joined() as client:
        session = await client.register()
        client.registry.gate.set()
        for tag in range(CONSUMPTIONS_WATCHED_MAX + 1):
            get = Get()
            assert session.watch_consumption(tag, get.consumed), f"delivery {tag}"
            session.forget_consumption(tag, Get().consumed)  # which does not watch it
            session.forget_consumption(tag, get.consumed)
        heard = Heard()
        assert session.watch_consumption(CONSUMPTIONS_WATCHED_MAX + 1, heard)
        client.client.sendall(encode_frame(consumed(CONSUMPTIONS_WATCHED_MAX + 1, 1)))
        await heard.until(consumed(CONSUMPTIONS_WATCHED_MAX + 1, 1))


@pytest.mark.asyncio
async def test_a_flood_of_feedback_leaves_the_loop_to_others() -> None:
    async with joined() as client:
        session = await client.register()
        client.registry.gate.set()
        turns = 0
        turns_between: list[int] = []
        session.watch_consumption(1, lambda message: turns_between.append(turns))
        frames = b"".join([encode_frame(consumed(1, layer)) for layer in range(500)])
        client.client.sendall(frames)  # all there at once
        async with asyncio.timeout(DEADLINE_S):
            while len(turns_between) < 500:
                turns += 1
                await asyncio.sleep(0)
        assert len(set(turns_between)) == 500
