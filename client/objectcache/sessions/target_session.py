"""A session with the storage server: registers memory, hears of layers."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec

from objectcache.channel.responses import SessionReply
from objectcache.sessions.session_get import SessionGet
from objectcache.sessions.session_watch import SessionWatch
from objectcache.sessions.session_wire import SessionWire, SocketWire
from objectcache.sessions.tags import Tags
from objectcache_schemas.errors import ObjectCacheError, Unavailable, Unsupported, WireError
from objectcache_schemas.messages.frames import FrameError, encode_frame
from objectcache_schemas.messages.later_fields import AnswerDecoder
from objectcache_schemas.messages.message import PROTOCOL_VERSION, Message
from objectcache_schemas.messages.sessions import (
    CancelGet,
    DeliveryFailure,
    GetBegun,
    GetEnded,
    GetPrefix,
    JoinSession,
    LayersAwaited,
    LayersFreed,
    LayersReady,
    MoveSession,
    PassGiven,
    RegisterTarget,
    ReleaseTarget,
    SessionJoined,
    SessionPing,
    SessionPong,
    TargetEvent,
    TargetRegistered,
    TargetReleased,
)

M = TypeVar("M", bound=Message)

TOLD_MAX = 64  # messages that wait for another thread's send; a later one says more than an earlier
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_DECODER: AnswerDecoder[Any] = AnswerDecoder(TargetEvent)


class LayerSink(Protocol):
    """Who hears of one delivery's layers, on the session's thread."""

    def advance(self, ready_end: int) -> None:
        """All layers below `ready_end` are in place."""

    def fail(self, reason: str, cause: BaseException | None = None) -> None:
        """The delivery ended before its last layer."""


@dataclass(eq=False, slots=True)
class _Pending:
    """A request that waits for its reply."""

    reply_type: type[Message]
    released_id: bytes | None = None
    future: Future[Any] = field(default_factory=Future[Any])

    def is_answered_by(self, message: Message) -> bool:
        return isinstance(message, self.reply_type) and (
            getattr(message, "target_id", None) == self.released_id or self.released_id is None
        )


class TargetSession:
    """One joined session. Thread-safe; a thread of its own reads what the server sends.

    When the connection ends, every delivery that still listens fails, and every request too. A
    session does not come back; its targets are gone.
    """

    def __init__(self, wire: SessionWire, timeout_s: float) -> None:
        """Take over a connection that has joined."""
        self._wire = wire
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._sending = threading.Lock()  # taken before the other; whoever has it writes
        self._told: deque[Message] = deque(maxlen=TOLD_MAX)
        self._freed: dict[int, int] = {}  # by tag: a ring's freed end, until it is on its way
        self._pending: list[_Pending] = []
        self._sinks: dict[int, LayerSink] = {}
        self._gets: dict[int, SessionGet] = {}
        self._hears_awaited = False  # else its server is of a release before that
        self._passes: dict[str, float] = {}  # until when the session may get from a bucket
        self._tags = Tags()
        self._ended_because: str | None = None
        self.is_left = False
        self._attending = 0
        self.is_asked_to_move = False  # to another session, which may be another server's
        self.heard_count = 0
        self._thread = threading.Thread(
            target=self._read, name="objectcache-target-session", daemon=True
        )
        self._thread.start()
        self._watch = SessionWatch(self)

    @classmethod
    def join(cls, invitation: SessionReply, timeout_s: float) -> TargetSession:
        """Present a ticket. Raises `Unsupported` where the server runs on another host, and
        `Unavailable` where its socket is out of reach or refuses.
        """
        if invitation.host_id != own_host_id():
            raise Unsupported("the storage server is on another host")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect(invitation.socket_path)
            sock.sendall(encode_frame(JoinSession(v=PROTOCOL_VERSION, ticket=invitation.ticket)))
            wire = SocketWire(sock, timeout_s)
            sock.settimeout(timeout_s)
            _check_joined(wire.receive_one())
            sock.settimeout(None)
        except (OSError, FrameError, msgspec.MsgspecError) as error:
            sock.close()
            raise Unavailable(f"target socket {invitation.socket_path}: {error}") from error
        except BaseException:
            sock.close()
            raise
        return cls(wire, timeout_s)

    @property
    def ended(self) -> bool:
        """Whether the connection has ended."""
        return self._ended_because is not None

    @property
    def is_waited_for(self) -> bool:
        """Whether the server is to say something."""
        with self._lock:
            return bool(self._pending or self._sinks or self._gets or self._attending)

    def ping(self) -> None:
        """Have the server say something; never waits."""
        self.tell(SessionPing())

    def give_up(self, reason: str) -> None:
        """End the session, whose server stands still: nobody joins its threads."""
        self._end(reason)
        self._wire.shut_down()

    def leave(self) -> None:
        """Another session has taken its place: it ends once nothing was waited for in a whole pause
        of its watch, within which whoever has just been given it begins to wait.
        """
        self.is_left = True

    def listen(self, sink: LayerSink) -> int:
        """A tag for one delivery, whose events go to `sink` until `forget`.

        Raises `Unavailable` once the session has ended, or where it has no tag left.
        """
        with self._lock:
            self._check_open()
            tag = self._tags.draw(self._sinks)
            self._sinks[tag] = sink
            return tag

    def forget(self, tag: int) -> None:
        """Events with this tag concern nobody any more."""
        self._forget(tag)

    def _forget(self, tag: int) -> bool:
        with self._lock:
            self._freed.pop(tag, None)
            return self._sinks.pop(tag, None) is not None

    def register(self, fd: int, length_bytes: int) -> bytes:
        """Register a memory file; returns the target's id.

        Raises `Unavailable` when the session has ended or the server does not answer, or what the
        server says against it.
        """
        request = RegisterTarget(length_bytes=length_bytes)
        reply: TargetRegistered = self.ask(request, TargetRegistered, fd)
        self._hears_awaited = reply.hears_awaited
        return reply.target_id

    def ask(self, request: Message, reply_type: type[M], fd: int | None = None) -> M:
        """Send a request and wait for its reply; raises as `register` does."""
        pending = _Pending(reply_type)
        self._send(request, pending, fd)
        try:
            reply: M = pending.future.result(self._timeout_s)
        except FutureTimeoutError as error:
            self.close()
            raise Unavailable(
                f"no answer over {self._wire.name} for {self._timeout_s} s"
            ) from error
        return reply

    def may_get(self, bucket: str) -> bool:
        """Whether a get from this bucket may go over the session itself, as far as is known."""
        return self._passes.get(bucket, 0.0) > time.monotonic()

    def refused_get(self, bucket: str) -> None:
        """The session may not any more."""
        self._passes.pop(bucket, None)

    def get(self, request: GetPrefix) -> SessionGet:
        """Send a get; its tag must be one that `listen` gave. Raises `Unavailable`."""
        get = SessionGet(request.tag)
        self._send(request, get)
        return get

    def cancel_get(self, get: SessionGet) -> None:
        """Have the server end it; no effect where it has ended, or the session has."""
        if get.is_over:
            return
        with suppress(Unavailable):
            self._send(CancelGet(tag=get.tag))

    @contextmanager
    def attended(self) -> Generator[None]:
        """While the server reads the session's memory and announces nothing."""
        with self._lock:
            self._attending += 1
        try:
            yield
        finally:
            with self._lock:
                self._attending -= 1

    def release(self, target_id: bytes, on_end: Callable[[bool], None]) -> None:
        """Stop writing to a target; returns at once.

        `on_end` is called once, on any thread: with True when the server says that nothing writes
        to it any more, with False when the session ended before it could say so.
        """
        pending = _Pending(TargetReleased, target_id)
        pending.future.add_done_callback(lambda future: on_end(future.exception() is None))
        try:
            self._send(ReleaseTarget(target_id=target_id), pending)
        except Unavailable as error:
            if not pending.future.done():
                pending.future.set_exception(error)

    def tell(self, message: Message) -> None:
        """Send what nobody answers, without ever waiting: dropped where the socket is full or the
        session has ended.
        """
        self._told.append(message)
        self._send_told()

    def awaits(self, tag: int, end_layer: int, interval_s: float) -> None:
        """Have the server announce nothing of a delivery before all layers below `end_layer` are in
        place, but for once in so long. Never waits. It may be lost: then there are more
        announcements, or they come by the interval.
        """
        if self._hears_awaited:
            self.tell(LayersAwaited(tag=tag, end_layer=end_layer, interval_s=interval_s))

    def free_layers(self, tag: int, end_layer: int) -> None:
        """Nobody reads the layers of a delivery's ring below `end_layer` any more. Never waits, and
        is not lost: what finds no room goes with what is next sent, at the next ping at the latest.
        """
        with self._lock:
            if tag in self._sinks:  # else it has ended
                self._freed[tag] = max(end_layer, self._freed.get(tag, end_layer))
        self._send_told()

    def close(self) -> None:
        """End the session. Repeating has no effect."""
        self._end("the session was closed")
        self._watch.close()
        self._wire.leave()
        self._wire.shut_down()
        if threading.current_thread() is not self._thread:
            self._thread.join(self._timeout_s)

    def _send(
        self,
        message: Message,
        waiting: _Pending | SessionGet | None = None,
        fd: int | None = None,
    ) -> None:
        """Send a message, and keep who waits for what it is answered with: a request's place in
        `_pending` is its place on the wire.
        """
        try:
            with self._sending:
                with self._lock:
                    self._check_open()
                    if isinstance(waiting, SessionGet):
                        self._gets[waiting.tag] = waiting
                    elif waiting is not None:
                        self._pending.append(waiting)
                self._wire.send(message, fd)
        except OSError as error:
            reason = f"{self._wire.name} broke: {error}"
            with self._lock:
                if waiting in self._pending:  # else the session ended meanwhile, and with it this
                    self._pending.remove(waiting)
            self._end(reason)
            self._wire.shut_down()
            raise Unavailable(reason) from error
        self._send_told()

    def _send_told(self) -> None:
        """Send what was freed and told, unless another thread is sending: that one does it then."""
        while (self._freed or self._told) and self._sending.acquire(blocking=False):
            try:
                self._send_freed()
                while self._told:
                    self._wire.send_now(self._told.popleft())
            except OSError:
                self._told.clear()
                return
            finally:
                self._sending.release()

    def _send_freed(self) -> None:
        while (freed := self._next_freed()) is not None:
            tag, end_layer = freed
            self._wire.send_now(LayersFreed(tag=tag, end_layer=end_layer))
            with self._lock:
                if self._freed.get(tag) == end_layer:
                    del self._freed[tag]

    def _next_freed(self) -> tuple[int, int] | None:
        with self._lock:
            return next(iter(self._freed.items()), None)

    def _check_open(self) -> None:
        if self._ended_because is not None:
            raise Unavailable(self._ended_because)

    def _read(self) -> None:
        reason = "the storage server ended the session"
        try:
            for frame in self._wire.receive():
                self.heard_count += 1
                if (message := _DECODER.decode_known(frame)) is not None:
                    self._dispatch(message)
        except (OSError, FrameError, msgspec.MsgspecError) as error:
            reason = f"{self._wire.name} broke: {error}"
        finally:
            self._end(reason)
            self._watch.close()
            self._wire.shut_down()  # whoever is sending shall not keep it open
            with self._sending:
                self._wire.close()

    def _dispatch(self, message: Message | WireError) -> None:
        match message:
            case LayersReady():
                if sink := self._sink(message.tag):
                    sink.advance(message.end_layer)
            case DeliveryFailure():
                if sink := self._sink(message.tag):
                    error = ObjectCacheError.from_wire(message.error)
                    sink.fail(f"{message.error.code}: {message.error.message}", error)
            case GetBegun():
                if get := self._gets.get(message.tag):
                    get.begun(message)
            case GetEnded():
                with self._lock:
                    get = self._gets.pop(message.tag, None)
                if get is not None:
                    get.ended(message)
            case SessionPong():
                pass
            case PassGiven():
                self._passes[message.bucket] = time.monotonic() + message.lives_s
            case MoveSession():
                self.is_asked_to_move = True
            case _:
                self._answer(message)

    def _sink(self, tag: int) -> LayerSink | None:
        with self._lock:
            return self._sinks.get(tag)

    def _answer(self, message: Message | WireError) -> None:
        with self._lock:
            pending = _answered(self._pending, message)
            if pending is None:
                return
            self._pending.remove(pending)
        if isinstance(message, WireError):
            pending.future.set_exception(ObjectCacheError.from_wire(message))
        else:
            pending.future.set_result(message)

    def _end(self, reason: str) -> None:
        with self._lock:
            if self._ended_because is not None:
                return
            self._ended_because = reason
            pending, self._pending = self._pending, []
            sinks, self._sinks = self._sinks, {}
            self._freed.clear()
            gets, self._gets = self._gets, {}
        for waiting in pending:
            waiting.future.set_exception(Unavailable(reason))
        for sink in sinks.values():
            sink.fail(reason)
        for get in gets.values():
            get.lost(reason)

    def __repr__(self) -> str:
        state = self._ended_because or f"{len(self._sinks)} deliveries"
        return f"<TargetSession {state}>"


def _answered(waiting: Sequence[_Pending], message: Message | WireError) -> _Pending | None:
    """The request that a message answers.

    An error names none. A release may stay unanswered for as long as something is being read or
    written, so an error belongs to the oldest other request, and to a release only when nothing
    else waits.
    """
    if isinstance(message, WireError):
        return min(waiting, key=lambda pending: pending.released_id is not None, default=None)
    return next((pending for pending in waiting if pending.is_answered_by(message)), None)


def own_host_id() -> str:
    """This host's boot id; where there is none, a text that is no server's."""
    try:
        with open(_BOOT_ID) as file:
            return file.read().strip()
    except OSError:
        return f"unknown, process {os.getpid()}"


def _check_joined(frame: bytes) -> None:
    reply = _DECODER.decode(frame)
    if isinstance(reply, WireError):
        raise Unavailable(f"the target socket refused the session: {reply.message}")
    if not isinstance(reply, SessionJoined):
        raise FrameError(f"expected SessionJoined, got {type(reply).__name__}")
