"""Sessions: clients register memory and hear of its layers, on this host's target socket or, from
anywhere, through a gateway.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine
from typing import Any, NamedTuple

import msgspec

from objectcache_fabrics.leased_memory import RemoteTargetMemory
from objectcache_fabrics.peers import FabricPeer
from objectcache_fabrics.registered_memory import RemoteMemory
from objectcache_runtime.first_of import end, first_done
from objectcache_runtime.networking.stream_socket import ConnectionEnded, StreamSocket
from objectcache_runtime.settings import StorageSettings
from objectcache_runtime.shares.fair_shares import FairShares
from objectcache_runtime.shares.message_pace import MessagePace
from objectcache_schemas.accounts import ROOT_USER
from objectcache_schemas.errors import (
    AccessDenied,
    Busy,
    InvalidRequest,
    ObjectCacheError,
    Unavailable,
)
from objectcache_schemas.excerpt import excerpt
from objectcache_schemas.messages.frames import FrameError, encode_frame
from objectcache_schemas.messages.message import PROTOCOL_VERSION
from objectcache_schemas.messages.sessions import (
    CancelGet,
    FabricOpened,
    GetEnded,
    GetPrefix,
    JoinSession,
    LayersAwaited,
    LayersConsumed,
    LayersFreed,
    MoveSession,
    OpenFabric,
    RegisterRemoteTarget,
    RegisterTarget,
    ReleaseTarget,
    ReturnCredits,
    SessionJoined,
    SessionPing,
    SessionPong,
    TargetRegistered,
    TargetReleased,
    TargetRequest,
)
from objectcache_storage_server.conversations.awaited_layers import AwaitedLayers
from objectcache_storage_server.conversations.fabric_threads import FabricThreads
from objectcache_storage_server.conversations.tickets import TicketBook
from objectcache_storage_server.transports.fabrics import Fabrics
from objectcache_storage_server.transports.targets import (
    RegisteredTarget,
    TargetOwner,
    TargetRegistry,
)

JOIN_TIMEOUT_S = 10.0
REQUEST_BYTES_MAX = 64 << 10  # far above every request; a client that has not joined may send one
UNSENT_BYTES_MAX = 1 << 20  # events a client has not taken; a client that far behind is gone
GETS_MAX = 256  # of one session at a time; more would only wait
CONSUMPTIONS_WATCHED_MAX = 4096  # of one session; the deliveries past it are served without
COMPUTE_S_MAX = 3600.0  # of one layer
WAITED_S_MAX = 86400.0

logger = logging.getLogger("objectcache.storage_server.sessions")
_DECODER = msgspec.msgpack.Decoder(TargetRequest)


class _Watch(NamedTuple):
    """Who hears of a delivery's consumption, and who is told that nobody does any more."""

    callback: Callable[[LayersConsumed], None]
    dropped: Callable[[], None] | None


class Session(TargetOwner):
    """One client. `fabric` is the transport and the peer that reach it, once it has opened one."""

    def __init__(
        self, identity: str, socket: StreamSocket, access_key: str = "", *, is_local: bool = False
    ) -> None:
        """`is_local`: it has joined on the target socket, which its host alone reaches."""
        super().__init__(identity, access_key)
        self.is_local = is_local
        self.asked_to_move_s = -math.inf  # by time.monotonic
        self.gets: dict[int, asyncio.Event] = {}  # that run, by tag; the event cancels one
        self._socket = socket
        self._loop = asyncio.get_running_loop()
        self._unsent = bytearray()
        self._flushing = False
        self._lock = threading.Lock()
        self._flush_task: asyncio.Task[None] | None = None
        self._consumptions: dict[int, _Watch] = {}
        self._awaited = AwaitedLayers()
        self._kept_timer: asyncio.TimerHandle | None = None
        self._has_kept = False  # and the timer runs, or is about to
        self._rings: dict[int, Callable[[LayersFreed], None]] = {}
        self._stopped = False
        self.broken = asyncio.Event()
        self.fabric: tuple[str, FabricPeer] | None = None
        self.fabric_shares: FairShares | None = None  # of which it has a place
        self._fabric_lost = False

    async def stop(self) -> None:
        """Send and hear nothing more; the socket may be closed when this returns."""
        with self._lock:
            self._stopped = True
            watches = list(self._consumptions.values())
            self._consumptions.clear()
        for cancelled in self.gets.values():
            cancelled.set()
        for watch in watches:
            self._drop(watch)
        if self._kept_timer is not None:
            self._kept_timer.cancel()
        if self._flush_task is not None:
            await end(self._flush_task)

    def post(self, message: msgspec.Struct) -> None:
        """At once if the socket takes it. Of layers that nobody waits for yet, seldom."""
        with self._lock:
            events = list(self._awaited.passed(message, time.monotonic()))
            for event in events:
                self._send(event)
            if not events and not self._has_kept and not self._stopped:  # it is kept
                self._has_kept = True
                self._loop.call_soon_threadsafe(self._send_kept)

    def _send_kept(self) -> None:
        """Announce what was kept for its interval, and come back while more is kept."""
        with self._lock:
            if self._stopped:
                return
            if self._kept_timer is not None:
                self._kept_timer.cancel()
            now_s = time.monotonic()
            for event in self._awaited.due(now_s):
                self._send(event)
            due_s = self._awaited.next_due_s
            self._has_kept = due_s is not None
            if due_s is not None:
                self._kept_timer = self._loop.call_later(due_s - now_s, self._send_kept)

    def awaits(self, message: LayersAwaited) -> None:
        """The client waits for a later layer than the next. Nonsense is ignored."""
        if message.interval_s >= 0:  # no NaN is
            with self._lock:
                for event in self._awaited.awaits(message, time.monotonic()):
                    self._send(event)
            if self._has_kept:
                self._send_kept()  # the interval may be another

    def forget_awaited(self, tag: int) -> None:
        """A get begins that has this tag."""
        with self._lock:
            self._awaited.forget(tag)

    def _send(self, message: msgspec.Struct) -> None:
        data = encode_frame(message)
        if not self._unsent:
            try:
                data = data[self._socket.send_now(data) :]
            except OSError:
                data = b""
                self._loop.call_soon_threadsafe(self.broken.set)
        self._unsent += data
        if len(self._unsent) > UNSENT_BYTES_MAX:
            self._loop.call_soon_threadsafe(self.broken.set)
        elif self._unsent and not self._flushing:
            self._flushing = True
            self._loop.call_soon_threadsafe(self._start_flush)

    def is_gone(self) -> bool:
        return self._stopped or self._socket.has_hung_up()

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs for it now."""
        return not self.gets and not any(one.leases for one in self.targets.values())

    def ask_to_move(self, now_s: float) -> None:
        """Have the client join another session when it next needs one."""
        self.asked_to_move_s = now_s
        self.post(MoveSession())

    def lose_fabric(self) -> None:
        """The fabric does not reach the client any more, so the session ends; from any thread."""
        self._fabric_lost = True
        self._loop.call_soon_threadsafe(self.broken.set)

    def post_released(self, message: TargetReleased) -> None:
        """Tell that a target is free; not once the fabric is lost. What it still carries may reach
        the client then, which is safe from it when it has seen the session's end.
        """
        if not self._fabric_lost:
            self.post(message)

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self.broken.set)

    def watch_consumption(
        self,
        tag: int,
        callback: Callable[[LayersConsumed], None],
        dropped: Callable[[], None] | None = None,
    ) -> bool:
        with self._lock:
            if tag not in self.gets:  # it came over HTTP, and begins; other gets did when they came
                self._awaited.forget(tag)
            before = self._consumptions.get(tag)
            is_full = before is None and len(self._consumptions) >= CONSUMPTIONS_WATCHED_MAX
            if self._stopped or is_full:
                return False
            self._consumptions[tag] = _Watch(callback, dropped)
        if before is not None:
            self._drop(before)
        return True

    def _drop(self, watch: _Watch) -> None:
        if watch.dropped is not None:
            self._loop.call_soon_threadsafe(watch.dropped)

    def forget_consumption(self, tag: int, callback: Callable[[LayersConsumed], None]) -> None:
        with self._lock:
            watch = self._consumptions.get(tag)
            if watch is not None and watch.callback == callback:
                del self._consumptions[tag]

    def consumed(self, message: LayersConsumed) -> None:
        """Tell whoever watches. Nonsense is ignored: it must not cost a client its targets."""
        if not is_plausible(message):
            logger.debug("session of %s: ignored %r", self.identity, message)
            return
        with self._lock:
            watch = self._consumptions.get(message.tag)
        if watch is not None:
            watch.callback(message)

    def watch_freed(self, tag: int, callback: Callable[[LayersFreed], None]) -> None:
        self._rings[tag] = callback

    def forget_freed(self, tag: int, callback: Callable[[LayersFreed], None]) -> None:
        if self._rings.get(tag) == callback:
            del self._rings[tag]

    def freed(self, message: LayersFreed) -> None:
        """Tell whoever fills the ring; of a delivery that has ended nobody does."""
        if (callback := self._rings.get(message.tag)) is not None:
            callback(message)

    def _start_flush(self) -> None:
        self._flush_task = asyncio.create_task(self._flush())

    async def _flush(self) -> None:
        try:
            while True:
                await self._socket.writable()
                with self._lock:
                    del self._unsent[: self._socket.send_now(bytes(self._unsent))]
                    if not self._unsent:
                        self._flushing = False
                        return
        except (OSError, ConnectionEnded):
            self.broken.set()


ServeGet = Callable[[Session, GetPrefix, asyncio.Event], Coroutine[Any, Any, None]]


async def _serve_no_get(session: Session, request: GetPrefix, _: asyncio.Event) -> None:
    refusal = AccessDenied("this server serves no gets over sessions; get over HTTP")
    session.post(GetEnded(tag=request.tag, error=refusal.to_wire()))


class SessionServer:
    """Serves sessions, from their beginning to their end."""

    def __init__(
        self,
        registry: TargetRegistry,
        fabrics: Fabrics,
        tickets: TicketBook,
        storage: StorageSettings,
    ) -> None:
        self.serve_get: ServeGet = _serve_no_get  # carries a get to its end; raises nothing
        self._gets: set[asyncio.Task[None]] = set()
        self._registry = registry
        self._fabrics = fabrics
        self._tickets = tickets
        self._storage = storage
        self._sessions: dict[Session, None] = {}  # the oldest first
        self._session_shares = FairShares(storage.sessions_max)
        self._threads = FabricThreads(storage.sessions_max)

    @property
    def sessions(self) -> Collection[Session]:
        """Those that are open, the oldest first."""
        return self._sessions.keys()

    @property
    def open_count(self) -> int:
        """Sessions that are open."""
        return len(self._sessions)

    async def serve(self, socket: StreamSocket, joined: Callable[[], object]) -> None:
        """Carry a connection of the target socket until it ends, then let its targets go.

        `joined` is called once it has joined a session.
        """
        try:
            async with asyncio.timeout(JOIN_TIMEOUT_S):
                session = await self._join(socket)
        except (ConnectionEnded, FrameError, TimeoutError, OSError):
            return
        if session is not None:
            joined()
            await self._carry(session, socket)

    async def serve_client_of_gateway(
        self, identity: str, socket: StreamSocket, access_key: str = ""
    ) -> None:
        """Carry a session whose identity a gateway has authenticated. Raises `Busy`."""
        self._check_room(identity)
        session = Session(identity, socket, access_key)
        session.post(SessionJoined(v=PROTOCOL_VERSION))
        await self._carry(session, socket)

    async def _carry(self, session: Session, socket: StreamSocket) -> None:
        self._sessions[session] = None
        self._session_shares.take(session.identity, 1)
        try:
            await self._serve_until_broken(session, socket)
        finally:
            await session.stop()
            self._sessions.pop(session, None)
            self._session_shares.give_back(session.identity, 1)
            if session.fabric is not None:
                session.fabric[1].close()  # first: what it writes holds the targets
            _leave_fabric(session)
            for target in list(session.targets.values()):
                self._registry.release(target, _nothing)

    def _check_room(self, identity: str) -> None:
        """Raises `Busy`. A user without any has one for as long as another user has several: the
        youngest of whoever has most ends.
        """
        shares = self._session_shares
        if shares.free <= 0 and not shares.held(identity):
            youngest = self._youngest_of_most()
            if youngest is not None:
                logger.info("a session of %s ends for one of %s", youngest.identity, identity)
                youngest.broken.set()
                return
        _check_share(self._session_shares, identity, "sessions", "storage.sessions_max")

    def _youngest_of_most(self) -> Session | None:
        """Of a user with several that go on; the operator's are left alone."""
        going_on = [one for one in self._sessions if not one.broken.is_set()]
        counts = Counter(one.identity for one in going_on if one.identity != ROOT_USER)
        if not counts or (most := counts.most_common(1)[0])[1] < 2:
            return None
        return next(one for one in reversed(going_on) if one.identity == most[0])

    async def _join(self, socket: StreamSocket) -> Session | None:
        try:
            request = await _receive(socket)
            if not isinstance(request, JoinSession) or request.v != PROTOCOL_VERSION:
                raise InvalidRequest(f"the first message must be JoinSession, v {PROTOCOL_VERSION}")
            holder = self._tickets.redeem(request.ticket, time.monotonic())
            self._check_room(holder.identity)
        except ObjectCacheError as error:
            await socket.send_frame(error.to_wire())
            return None
        session = Session(holder.identity, socket, holder.access_key, is_local=True)
        session.post(SessionJoined(v=PROTOCOL_VERSION))
        return session

    async def _serve_until_broken(self, session: Session, socket: StreamSocket) -> None:
        requests = asyncio.ensure_future(self._serve_requests(session, socket))
        broken = asyncio.ensure_future(session.broken.wait())
        try:
            await first_done(requests, broken)
        finally:
            results = await end(requests, broken)
        for result in results:
            if isinstance(result, Exception) and not isinstance(
                result, (ConnectionEnded, FrameError, OSError)
            ):
                logger.error("session of %s failed", session.identity, exc_info=result)

    async def _serve_requests(self, session: Session, socket: StreamSocket) -> None:
        """One request a turn of the loop, whatever a client sends: others have theirs between."""
        pace = MessagePace(self._storage.session_messages_per_s, time.monotonic())
        while not session.broken.is_set():
            try:
                request = await _receive(socket)
            except InvalidRequest as error:
                session.post(error.to_wire())
                raise ConnectionEnded from error
            descriptor = socket.take_descriptor()
            try:
                await self._serve_request(session, request, descriptor)
            except ObjectCacheError as error:
                session.post(error.to_wire())
            finally:
                if descriptor is not None:
                    os.close(descriptor)
            await asyncio.sleep(pace.count(time.monotonic()))

    async def _serve_request(
        self, session: Session, request: TargetRequest, descriptor: int | None
    ) -> None:
        match request:
            case RegisterTarget() if descriptor is not None:
                target = await self._register(session, descriptor, request.length_bytes)
                registered = TargetRegistered(target_id=target.target_id, hears_awaited=True)
                session.post(registered)
            case OpenFabric():
                session.post(await self._open_fabric(session, request))
            case RegisterRemoteTarget():
                target = await self._register_remote(session, request)
                session.post(TargetRegistered(target_id=target.target_id))
            case ReturnCredits():
                if session.fabric is not None:
                    session.fabric[1].return_credits(request.count)
            case ReleaseTarget() if request.target_id in session.targets:
                released = TargetReleased(target_id=request.target_id)
                target = session.targets[request.target_id]
                self._registry.release(target, lambda: session.post_released(released))
            case ReleaseTarget():
                raise InvalidRequest("target_id is not registered in this session")
            case SessionPing():
                session.post(SessionPong())
            case LayersConsumed():
                session.consumed(request)
            case LayersAwaited():
                session.awaits(request)
            case LayersFreed():
                session.freed(request)
            case GetPrefix():
                self._start_get(session, request)
            case CancelGet():
                if request.tag in session.gets:
                    session.gets[request.tag].set()
            case RegisterTarget():
                raise InvalidRequest("RegisterTarget needs a memory file beside it")
            case _:
                raise InvalidRequest("the session is joined already")

    def _start_get(self, session: Session, request: GetPrefix) -> None:
        """Serve a get beside what else the session asks. Raises `InvalidRequest` for a tag in use:
        an end that is told could be either's.
        """
        if request.tag in session.gets:
            raise InvalidRequest("tag is that of another get of this session")
        if len(session.gets) >= GETS_MAX:
            busy = Busy(f"{GETS_MAX} gets of this session run", retry_after_s=1.0)
            session.post(GetEnded(tag=request.tag, error=busy.to_wire()))
            return
        cancelled = session.gets[request.tag] = asyncio.Event()
        session.forget_awaited(request.tag)
        get = self.serve_get(session, request.with_adopted_labels(), cancelled)
        task = asyncio.create_task(get)
        self._gets.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._gets.discard(task)
            del session.gets[request.tag]

        task.add_done_callback(ended)

    @property
    def gets(self) -> Collection[asyncio.Task[None]]:
        """The gets that sessions have asked for themselves, and that have not ended."""
        return self._gets

    async def _open_fabric(self, session: Session, request: OpenFabric) -> FabricOpened:
        if session.fabric is not None:
            raise InvalidRequest("the session has opened a fabric already")
        shares = self._fabrics.session_shares.get(request.transport)
        if shares is not None:
            name = request.transport
            what, setting = f"sessions over {name.upper()}", f"storage.{name}_sessions_max"
            _check_share(shares, session.identity, what, setting)
            shares.take(session.identity, 1)
            session.fabric_shares = shares
        try:
            return await self._open_peer(session, request)
        except ObjectCacheError:
            _leave_fabric(session)
            raise

    async def _open_peer(self, session: Session, request: OpenFabric) -> FabricOpened:
        opening = await self._threads.start(
            session.identity,
            self._fabrics.open,
            request.transport,
            request.endpoint,
            session.identity,
        )
        try:
            peer, endpoint = await asyncio.shield(opening)
        except Unavailable:
            session.broken.set()  # each try may take long, so another one takes another session
            raise
        except asyncio.CancelledError:
            opening.add_done_callback(_close_peer)
            raise
        session.fabric = (request.transport, peer)
        peer.when_broken(session.lose_fabric)
        return FabricOpened(endpoint=endpoint)

    async def _register_remote(
        self, session: Session, request: RegisterRemoteTarget
    ) -> RegisteredTarget:
        if session.fabric is None:
            raise InvalidRequest("RegisterRemoteTarget needs OpenFabric before it")
        transport, peer = session.fabric
        memory = RemoteMemory(
            request.address,
            request.length_bytes,
            request.key,
            request.device_id,
            request.memory,
        )
        self._registry.check_budget(session, memory.length_bytes)
        admitting = await self._threads.start(
            session.identity, peer.admit, memory, request.metadata
        )
        try:
            await asyncio.shield(admitting)
        except Unavailable:
            session.end()  # the peer is of no use any more
            raise
        except asyncio.CancelledError:
            await asyncio.wait([admitting])
            raise
        remote = RemoteTargetMemory(transport, memory, peer, session.post)
        return self._registry.register_remote(session, remote)

    async def _register(
        self, session: Session, descriptor: int, length_bytes: int
    ) -> RegisteredTarget:
        """Map the file in a thread. A cancelled caller waits for it too: until then the descriptor
        is in use, and the target is not yet one that the session's end would let go.
        """
        registering = asyncio.ensure_future(
            asyncio.to_thread(self._registry.register, session, descriptor, length_bytes)
        )
        try:
            return await asyncio.shield(registering)
        except asyncio.CancelledError:
            await asyncio.wait([registering])
            raise

    def __repr__(self) -> str:
        return f"<SessionServer {len(self._sessions)} sessions>"


def is_plausible(consumed: LayersConsumed) -> bool:
    """Whether the numbers can be a delivery's. No NaN is: it compares as false."""
    waited_s = consumed.waited_s or 0.0
    are_times = 0 <= consumed.compute_s <= COMPUTE_S_MAX and 0 <= waited_s <= WAITED_S_MAX
    return consumed.end_layer >= 0 and are_times


def _leave_fabric(session: Session) -> None:
    if session.fabric_shares is not None:
        session.fabric_shares.give_back(session.identity, 1)
        session.fabric_shares = None


def _check_share(shares: FairShares, identity: str, what: str, setting: str) -> None:
    """Raises `Busy` where this user may open no more. The operator may, as long as one is free."""
    if shares.free > 0 and (identity == ROOT_USER or shares.may_take(identity, 1)):
        return
    raise Busy(
        f"{shares.taken} {what} are open, {shares.held(identity)} of them of this user; {setting} "
        f"is {shares.total}, of which the rest is kept for others; close some, or have it raised",
        retry_after_s=1.0,
    )


async def _receive(socket: StreamSocket) -> TargetRequest:
    """The next request; raises `InvalidRequest` for a frame that holds none."""
    try:
        return await socket.receive_frame(_DECODER, REQUEST_BYTES_MAX)
    except FrameError as error:
        raise InvalidRequest(
            f"not a message of the target socket: {excerpt(str(error))}"
        ) from error


def _close_peer(opening: asyncio.Future[tuple[FabricPeer, bytes]]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result()[0].close()


def _nothing() -> None:
    """Nobody waits for this release."""
