"""Which of several storage servers a request goes to, and when it goes on to another."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from objectcache_gateway.storage.follow_servers import ServerFollower
from objectcache_gateway.storage.known_server import KnownServer
from objectcache_gateway.storage.storage_address import UnixAddress
from objectcache_gateway.storage.storage_connection import ConnectionLost, Unreachable
from objectcache_gateway.storage.storage_fleet import StorageFleet, on_host
from objectcache_gateway.storage.storage_pool import without_waiting
from objectcache_schemas.conversations import GatewayRequest
from objectcache_schemas.descriptor import TARGET_ID_BYTES
from objectcache_schemas.errors import Unavailable
from objectcache_schemas.limits import Limits
from objectcache_schemas.messages.buckets import DeleteBucket
from objectcache_schemas.messages.frames import LENGTH, encode_frame
from objectcache_schemas.messages.handshake import Done, Welcome
from objectcache_schemas.messages.leases import LeaseTarget
from objectcache_schemas.messages.message import PROTOCOL_VERSION, Message
from objectcache_schemas.messages.reads import StatObject
from objectcache_schemas.messages.sessions import CreateSession, JoinForClient
from objectcache_schemas.operators.server_list import GetServers, Servers, ServerState

STAT = StatObject(bucket="b", key="k")
DELETE = DeleteBucket(name="bbb")
DRAINING = Unavailable("the server goes", code="Draining").to_wire()
HOST_ID = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
_REQUEST = msgspec.msgpack.Decoder(GatewayRequest)


class FakeServer:
    """Answers every request with `reply`; None hangs up."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reply: object | None = Done()
        self.requests: list[Message] = []
        self.others: tuple[ServerState, ...] = ()
        self.load = 0
        self.recent = (0, 0.0)  # bytes and requests
        self.sessions = 0
        self.connections: list[asyncio.Task[None]] = []
        self.draining = False
        self.store_failure = ""
        self.asked = asyncio.Event()  # how it is
        self.place: dict[str, str] = {}  # fields that say where it is

    @property
    def server_id(self) -> bytes:
        return self.name.encode().ljust(8, b".")

    def state(self) -> ServerState:
        state = ServerState(
            server_id=self.server_id,
            host_id="here",
            load=self.load,
            recent_bytes=self.recent[0],
            recent_requests=self.recent[1],
            sessions=self.sessions,
            draining=self.draining,
            store_failure=self.store_failure,
        )
        return msgspec.structs.replace(state, **self.place)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionResetError):  # by a follower that is closed
            await self._answer(reader, writer)
        writer.close()
        with contextlib.suppress(ConnectionResetError):
            await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        welcome = False
        while header := await reader.read(LENGTH.size):
            body = await reader.readexactly(LENGTH.unpack(header)[0])
            if not welcome:
                welcome = True
                writer.write(encode_frame(Welcome(v=PROTOCOL_VERSION, engine="fake")))
                continue
            request = _REQUEST.decode(body)
            if isinstance(request, GetServers):
                self.asked.set()
                writer.write(encode_frame(Servers(answering=self.state(), others=self.others)))
                continue
            self.requests.append(request)
            if self.reply is None:
                break
            writer.write(encode_frame(self.reply))  # type: ignore[arg-type]

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection beside others."""
        self.connections.append(asyncio.create_task(self.serve(reader, writer)))


@asynccontextmanager
async def fleet_of(*servers: FakeServer, absent: int = 0) -> AsyncGenerator[StorageFleet]:
    """A fleet of these, of which the first drawn is asked, and of sockets where nobody listens."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / one.name for one in servers]
        listening = [
            await asyncio.start_unix_server(one.accept, path)
            for one, path in zip(servers, paths, strict=True)
        ]
        nowhere = [Path(folder) / f"absent-{number}" for number in range(absent)]
        addresses = [UnixAddress(path) for path in (*nowhere, *paths)]
        fleet = StorageFleet(addresses, Limits(), 8, 10.0, first_drawn)
        try:
            yield fleet
        finally:
            fleet.close()
            for one in listening:
                one.close()
            await asyncio.gather(*(task for one in servers for task in one.connections))


def first_drawn(servers: Sequence[KnownServer], count: int) -> list[KnownServer]:
    return list(servers[:count])


def known(fleet: StorageFleet, *servers: FakeServer) -> None:
    """As if every server had been asked."""
    for one, fake in zip(fleet.servers, servers, strict=True):
        one.heard(fake.state())


@pytest.mark.asyncio
async def test_the_less_loaded_of_two_is_asked_and_what_went_there_counts() -> None:
    first, second = FakeServer("first"), FakeServer("second")
    first.load = 2
    async with fleet_of(first, second) as fleet:
        known(fleet, first, second)
        async with fleet.conversation() as one, fleet.conversation() as another:
            await one.begin(STAT, Done)
            await another.begin(STAT, Done)
            assert (len(first.requests), len(second.requests)) == (0, 2)
            async with fleet.conversation() as third:
                await third.begin(STAT, Done)  # as many there now as here: the first drawn
        assert (len(first.requests), len(second.requests)) == (1, 2)
        assert [one.in_use for one in fleet.servers] == [0, 0]


@pytest.mark.asyncio
async def test_bytes_of_late_count_and_a_request_counts_as_the_mean_of_them() -> None:
    first, second = FakeServer("first"), FakeServer("second")
    first.recent, second.recent = (5_000, 2.0), (1_000, 4.0)  # 1,000 a request on average
    second.load = 1
    async with fleet_of(first, second) as fleet:
        known(fleet, first, second)
        # Each that went there counts once for what it moves, and while it runs as one to be done.
        for asked_there in (1, 2, 3):
            await fleet.call(STAT, Done)
            assert (len(first.requests), len(second.requests)) == (0, asked_there)
        await fleet.call(STAT, Done)  # as much there now as here: the first drawn
        assert len(first.requests) == 1


@pytest.mark.asyncio
async def test_sessions_go_first_to_a_server_that_was_added() -> None:
    servers = [FakeServer(name) for name in ("a", "b", "c")]
    for one, sessions in zip(servers, (10, 9, 0), strict=True):
        one.sessions = sessions
    async with fleet_of(*servers) as fleet:  # which draws the first two
        known(fleet, *servers)
        for _ in range(8):
            await fleet.call(JoinForClient(identity="a"), Done)
        assert [len(one.requests) for one in servers] == [0, 1, 7]


@pytest.mark.asyncio
@pytest.mark.parametrize("request_", [JoinForClient(identity="a"), CreateSession(identity="a")])
async def test_a_session_goes_to_whoever_of_two_has_fewer_and_those_that_went_there_count(
    request_: Message,
) -> None:
    first, second = FakeServer("first"), FakeServer("second")
    first.sessions, second.load = 2, 5  # what it has to do now is another matter
    async with fleet_of(first, second) as fleet:
        known(fleet, first, second)
        for _ in range(2):
            await fleet.call(request_, Done)
        assert (len(first.requests), len(second.requests)) == (0, 2)
        await fleet.call(request_, Done)  # as many there now as here: the less loaded
        assert (len(first.requests), len(second.requests)) == (1, 2)
        second.sessions = 1  # one of them has ended
        known(fleet, first, second)
        await fleet.call(request_, Done)
        assert (len(first.requests), len(second.requests)) == (1, 3)


@pytest.mark.asyncio
async def test_a_change_goes_on_where_nobody_took_the_connection() -> None:
    server = FakeServer("there")
    async with fleet_of(server, absent=2) as fleet:
        await fleet.call(DELETE, Done)
    assert server.requests == [DELETE]


@pytest.mark.asyncio
async def test_a_change_goes_on_where_the_server_says_that_it_goes() -> None:
    going, staying = FakeServer("going"), FakeServer("staying")
    going.reply = DRAINING
    async with fleet_of(going, staying) as fleet:
        await fleet.call(DELETE, Done)
    assert going.requests == staying.requests == [DELETE]


@pytest.mark.asyncio
async def test_what_all_refuse_is_refused() -> None:
    servers = [FakeServer("a"), FakeServer("b")]
    for one in servers:
        one.reply = DRAINING
    async with fleet_of(*servers) as fleet:
        with pytest.raises(Unavailable, match="the server goes"):
            await fleet.call(DELETE, Done)


@pytest.mark.asyncio
@pytest.mark.parametrize(("request_", "moves"), [(STAT, True), (DELETE, False)])
async def test_what_was_lost_is_asked_elsewhere_where_it_may_be_carried_out_twice(
    request_: Message, moves: bool
) -> None:
    dying, living = FakeServer("dying"), FakeServer("living")
    dying.reply = None
    async with fleet_of(dying, living) as fleet:
        if moves:
            await fleet.call(request_, Done)
        else:
            with pytest.raises(ConnectionLost):
                await fleet.call(request_, Done)
    assert len(living.requests) == int(moves)


@pytest.mark.asyncio
async def test_a_server_without_its_store_is_asked_only_where_no_other_is_left() -> None:
    away, there = FakeServer("away"), FakeServer("there")
    away.store_failure = "it cannot follow the log"
    async with fleet_of(away, there) as fleet:
        known(fleet, away, there)
        await fleet.call(DELETE, Done)
        assert (away.requests, there.requests) == ([], [DELETE])
        fleet.servers[1].lost()
        await fleet.call(STAT, Done)
        assert away.requests == [STAT]


@pytest.mark.asyncio
async def test_a_get_that_a_server_cannot_serve_is_asked_once_elsewhere_and_a_change_is_not() -> (
    None
):
    servers = [FakeServer(name) for name in ("a", "b", "c")]
    for one in servers[:2]:
        one.reply = Unavailable("the store did not answer").to_wire()
    async with fleet_of(servers[0], servers[2]) as fleet:
        await fleet.call(STAT, Done)
        with pytest.raises(Unavailable, match="did not answer"):
            await fleet.call(DELETE, Done)
    assert servers[2].requests == [STAT]
    async with fleet_of(*servers) as fleet:
        with pytest.raises(Unavailable, match="did not answer"):
            await fleet.call(STAT, Done)
    assert servers[1].requests == servers[2].requests == [STAT]


@pytest.mark.asyncio
async def test_where_nobody_is_there_whoever_cannot_wait_is_told_at_once() -> None:
    async with fleet_of(absent=2) as fleet:
        with without_waiting(), pytest.raises(Unreachable):
            await fleet.call(STAT, Done)


@pytest.mark.asyncio
async def test_a_request_with_a_target_goes_to_the_server_that_holds_it() -> None:
    servers = [FakeServer("a"), FakeServer("b"), FakeServer("c")]
    async with fleet_of(*servers) as fleet:
        known(fleet, *servers)
        for one in servers:
            await fleet.call(lease(one.server_id), Done)
            assert len(one.requests) == 1
        with pytest.raises(Unavailable, match="holds the target"):
            await fleet.call(lease(b"nobody.."), Done)


def lease(server_id: bytes) -> LeaseTarget:
    return LeaseTarget(
        identity="root",
        transport="shared_memory",
        target_id=server_id.ljust(TARGET_ID_BYTES, b"t"),
        offset_bytes=0,
        length_bytes=1,
        tag=1,
        payload_bytes=1,
        first_layer=0,
        end_layer=1,
    )


@pytest.mark.asyncio
async def test_a_host_is_preferred_and_a_server_that_goes_is_not() -> None:
    servers = [FakeServer("a"), FakeServer("b")]
    async with fleet_of(*servers) as fleet:
        known(fleet, *servers)
        there = msgspec.structs.replace(servers[1].state(), host_id="there")
        fleet.servers[1].heard(there)
        async with fleet.conversation(prefer=on_host("there")) as conversation:
            await conversation.begin(STAT, Done)
        assert len(servers[1].requests) == 1
        fleet.servers[1].heard(msgspec.structs.replace(there, draining=True))
        async with fleet.conversation(prefer=on_host("there")) as conversation:
            await conversation.begin(STAT, Done)
        assert len(servers[0].requests) == 1


@pytest.mark.asyncio
async def test_servers_are_met_through_one_that_tells_of_them() -> None:
    told, telling = FakeServer("told"), FakeServer("telling")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "told"
        listening = await asyncio.start_unix_server(told.accept, path)
        async with fleet_of(telling) as fleet:
            follower = ServerFollower(fleet)
            met = msgspec.structs.replace(told.state(), host_id=HOST_ID, socket_path=str(path))
            stranger = ServerState(server_id=b"stranger", host_id="elsewhere", address="h:1")
            telling.others = (met, stranger)
            follower.start()
            async with asyncio.timeout(30):
                await told.asked.wait()
            await follower.close()
            assert [one.name for one in fleet.servers] == [fleet.first.name, str(path)]
        listening.close()
        await asyncio.wait(told.connections)


class OtherHost(UnixAddress):
    """A server that is reached as one of another host is."""

    passes_descriptors = False

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(path)
        self._name = name

    def __str__(self) -> str:
        return self._name


@pytest.mark.asyncio
@pytest.mark.parametrize("host_id", ["another host", HOST_ID])  # a container of this host
async def test_servers_whose_sockets_have_one_path_are_met_by_their_addresses(host_id: str) -> None:
    own, other = FakeServer("own"), FakeServer("other")
    async with fleet_of(own, other) as both, fleet_of(own) as fleet:
        path, beside = fleet.first.name, Path(both.servers[1].name)
        own.place = {"host_id": HOST_ID, "socket_path": path, "address": "own:1"}
        other.place = {"host_id": host_id, "socket_path": path, "address": "other:1"}
        own.others, other.others = (other.state(),), (own.state(),)
        follower = ServerFollower(fleet, lambda address: OtherHost(beside, address))
        follower.start()
        try:
            async with asyncio.timeout(10):
                await other.asked.wait()
        finally:
            await follower.close()
        assert [one.name for one in fleet.servers] == [path, "other:1"]


@pytest.mark.asyncio
async def test_a_server_that_the_settings_name_twice_is_kept_by_its_socket() -> None:
    server = FakeServer("own")
    async with fleet_of(server) as fleet:
        local = fleet.first
        remote = fleet.add(OtherHost(Path(local.name), "own:1"), is_configured=True)
        fleet.servers.reverse()
        follower = ServerFollower(fleet)
        follower.start()
        try:
            async with asyncio.timeout(10):
                while remote in fleet.servers:
                    server.asked.clear()
                    await server.asked.wait()
        finally:
            await follower.close()
        assert fleet.servers == [local]
