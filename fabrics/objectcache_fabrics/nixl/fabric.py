"""Over NIXL: one-sided writes into a client's registered memory, and notifications beside them.

UCX chooses how: RDMA where there is any, else a copy between processes of one host, else TCP. Every
session has an agent and a thread of its own. So a copy into one client's memory holds up no other,
what one client sends as its metadata touches nobody else's, and the end of the agent is the end of
everything that was under way.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from objectcache_fabrics.nixl.agent import MemoryPiece, NixlAgent, NixlTransfer, library
from objectcache_fabrics.peers import Fabric, FabricPeer, WriteDone, WriteTimeout
from objectcache_fabrics.registered_memory import DeviceMemory, RemoteMemory
from objectcache_fabrics.staging_memory import StagingMemory
from objectcache_schemas.errors import DeliveryFailed, InvalidRequest, ObjectCacheError, Unavailable
from objectcache_schemas.messages.sessions import LayersReady, NixlNames

POLL_PAUSE_S = 50e-6  # between looks at what is under way: a write over a network takes as long
POLL_PAUSE_MAX_S = 1e-3  # while nothing moves: a client may stand still
POLL_PAUSE_SHARE = (
    1 / 8
)  # of the time for which nothing moved: so much later an end is seen at most
ANNOUNCED_S = 0.5  # a notification that was not taken at once may leave for so long
ANNOUNCED_PAUSE_S = 1e-3
METADATA_BYTES_MAX = 64 << 10
METADATA_LOADS_MAX = 4096  # in one session; the library forgets none
PROBE_BYTES = 4096
ADMIT_GRACE_S = 1.0  # past the deadline of the read that it takes
CLOSE_TIMEOUT_S = 10.0  # for a thread to end at the server's own end; measured: 0.05 s

logger = logging.getLogger("objectcache.fabrics.nixl")


@dataclass(slots=True)
class _Transfer:
    """A write or read that was asked for; `under_way` once it was begun."""

    operation: str
    here: MemoryPiece
    there: MemoryPiece
    done: WriteDone
    under_way: NixlTransfer | None = None
    deadline_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Lent:
    """Memory beside the staging memory that is written from."""

    memory: DeviceMemory
    registered: Any
    lost: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Call:
    """What the thread is asked to do; `refused` is told where it has ended before."""

    function: Callable[[NixlAgent], None]
    refused: Callable[[ObjectCacheError], None]


class NixlPeer(FabricPeer):
    """One session's agent, and the thread that it belongs to."""

    def __init__(
        self,
        staging: StagingMemory,
        devices: str,
        ucx_settings: str,
        timeout: WriteTimeout,
        names: NixlNames,
    ) -> None:
        """Raises `Unavailable` where the agent cannot be made."""
        self.names = names
        self._staging = staging
        self._timeout = timeout
        self._condition = threading.Condition()
        self._asked: deque[_Transfer | _Call] = deque()
        self._transfers: deque[_Transfer] = deque()
        self._error: ObjectCacheError | None = None
        self._closed = False
        self._loads_left = METADATA_LOADS_MAX
        self._loaded: set[RemoteMemory] = set()  # whether or not it was released since
        self._lent: dict[DeviceMemory, _Lent] = {}  # the thread's
        self._announced_until_s = 0.0
        self._moved_s = 0.0
        self._when_broken: Callable[[], None] | None = None
        self._lost = False
        self._probe = np.zeros(PROBE_BYTES, np.uint8)
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(devices, ucx_settings, started), name="nixl", daemon=True
        )
        self._thread.start()
        started.result()

    # --- what other threads call ---

    def admit(self, memory: RemoteMemory, metadata: bytes) -> None:
        if len(metadata) > METADATA_BYTES_MAX:
            raise InvalidRequest(
                f"metadata has {len(metadata)} bytes, at most {METADATA_BYTES_MAX} are taken"
            )
        admitted: Future[None] = Future()
        self._ask(
            _Call(
                lambda agent: self._add(agent, memory, metadata, admitted), admitted.set_exception
            )
        )
        try:
            admitted.result(self._timeout.timeout_s + ADMIT_GRACE_S)
        except DeliveryFailed as error:
            raise Unavailable(error.message) from error
        except TimeoutError as error:
            self.close()
            raise Unavailable(
                f"NIXL has not reached the client for {self._timeout.timeout_s:g} s"
            ) from error

    def lend(self, memory: DeviceMemory, lost: Callable[[], None]) -> None:
        self._ask(_Call(lambda agent: self._add_lent(agent, memory, lost), _ignore))

    def take_back(self, memory: DeviceMemory) -> None:
        self._ask(_Call(lambda agent: self._remove_lent(agent, memory), _ignore))

    def write(
        self, memory: RemoteMemory, offset_bytes: int, source: memoryview, done: WriteDone
    ) -> None:
        self._transfer("WRITE", memory, offset_bytes, source, done)

    def read(
        self, memory: RemoteMemory, offset_bytes: int, into: memoryview, done: WriteDone
    ) -> None:
        self._transfer("READ", memory, offset_bytes, into, done)

    def _transfer(
        self,
        operation: str,
        memory: RemoteMemory,
        offset_bytes: int,
        staged: memoryview,
        done: WriteDone,
    ) -> None:
        length_bytes = len(staged)
        assert 0 <= offset_bytes <= offset_bytes + length_bytes <= memory.length_bytes
        here = MemoryPiece(self._staging.address + self._staging.offset_of(staged), length_bytes)
        there = MemoryPiece(
            memory.address + offset_bytes, length_bytes, memory.device_id, memory.memory
        )
        self._ask(_Transfer(operation, here, there, done))

    def announce(self, tag: int, end_layer: int) -> None:
        message = msgspec.msgpack.encode(LayersReady(tag=tag, end_layer=end_layer))
        self._ask(_Call(lambda agent: self._notify(agent, message), _ignore))

    def when_broken(self, callback: Callable[[], None]) -> None:
        with self._condition:
            if not self._lost:
                self._when_broken = callback
                return
        callback()

    def return_credits(self, count: int) -> None:
        """Notifications need none."""

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify()

    def join(self, timeout_s: float) -> None:
        """After `close`: wait until the agent is closed and everybody was told."""
        self._thread.join(timeout_s)

    def _ask(self, what: _Transfer | _Call) -> None:
        with self._condition:
            error = self._error or (_gone() if self._closed else None)
            if error is None:
                self._asked.append(what)
                self._condition.notify()
                return
        self._refuse(what, error)

    @staticmethod
    def _refuse(what: _Transfer | _Call, error: ObjectCacheError) -> None:
        if isinstance(what, _Transfer):
            what.done(error)
        else:
            what.refused(error)

    # --- the thread ---

    def _run(self, devices: str, ucx_settings: str, started: Future[None]) -> None:
        try:
            agent = NixlAgent(self.names.server, devices, ucx_settings)
            staging = self._staging
            agent.register(MemoryPiece(staging.address, staging.length_bytes))
            agent.register(MemoryPiece(self._probe.ctypes.data, len(self._probe)))
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        self._end(agent, self._serve(agent))

    def _serve(self, agent: NixlAgent) -> ObjectCacheError:
        """Go on until the session has ended; returns why."""
        try:
            while self._wait():
                self._advance(agent)
        except ObjectCacheError as error:
            return DeliveryFailed(error.message)
        except Exception as caught:
            logger.exception("the agent of a session failed")
            return DeliveryFailed(f"NIXL failed: {type(caught).__name__}")
        return _gone()

    def _wait(self) -> bool:
        """Wait for something to do; false when the session has ended."""
        with self._condition:
            if not self._asked and not self._closed:
                self._condition.wait(self._pause_s())
            return not self._closed

    def _pause_s(self) -> float | None:
        if self._transfers:
            return poll_pause_s(time.monotonic() - self._moved_s)
        if time.monotonic() < self._announced_until_s:
            return ANNOUNCED_PAUSE_S
        return None

    def _advance(self, agent: NixlAgent) -> None:
        """One round: begin what was asked for, look at what is under way."""
        while self._asked:
            asked = self._asked.popleft()
            if isinstance(asked, _Transfer):
                self._begin(agent, asked)
            else:
                asked.function(agent)
                agent.notifications()  # has what was announced leave
            self._look(agent)
        agent.notifications()  # drives what is under way
        self._look(agent)

    def _begin(self, agent: NixlAgent, transfer: _Transfer) -> None:
        self._moved_s = time.monotonic()
        transfer.deadline_s = self._moved_s + self._timeout.timeout_s
        self._transfers.append(transfer)  # before it begins: whatever happens, it will be told
        transfer.under_way = agent.start(
            transfer.operation, [transfer.here], [transfer.there], self.names.client
        )

    def _look(self, agent: NixlAgent) -> None:
        for _ in range(len(self._transfers)):
            transfer = self._transfers[0]
            assert transfer.under_way is not None
            if agent.poll(transfer.under_way):
                self._transfers.popleft()
                self._moved_s = time.monotonic()
                agent.release(transfer.under_way)
                _tell(transfer.done, None)
            elif time.monotonic() > transfer.deadline_s:
                raise DeliveryFailed(
                    f"the client's memory was not reached by a {transfer.operation} for "
                    f"{self._timeout}"
                )
            else:
                self._transfers.rotate(-1)

    def _notify(self, agent: NixlAgent, message: bytes) -> None:
        agent.notify(self.names.client, message)
        self._announced_until_s = time.monotonic() + ANNOUNCED_S

    def _add(
        self, agent: NixlAgent, memory: RemoteMemory, metadata: bytes, admitted: Future[None]
    ) -> None:
        """Load the metadata, and read a byte: so the memory is what the client says, it can be
        reached, and the connection is there before the first delivery.
        """
        try:
            self._load(agent, memory, metadata)
        except ObjectCacheError as error:
            admitted.set_exception(error)
            return

        def read(error: ObjectCacheError | None) -> None:
            if error is None:
                admitted.set_result(None)
            else:
                admitted.set_exception(error)

        here = MemoryPiece(self._probe.ctypes.data, 1)
        there = MemoryPiece(memory.address, 1, memory.device_id, memory.memory)
        self._begin(agent, _Transfer("READ", here, there, read))

    def _load(self, agent: NixlAgent, memory: RemoteMemory, metadata: bytes) -> None:
        if self._loads_left == 0:
            raise InvalidRequest(
                f"a session may register {METADATA_LOADS_MAX} times; begin another one"
            )
        if any(_are_confused(memory, earlier) for earlier in self._loaded):
            raise InvalidRequest(
                "address, length_bytes: the memory overlaps other memory that this session has "
                "registered with the same device_id, and NIXL may take one for the other even "
                "when that was released; give DRAM a device_id of its own for each registration, "
                "or begin another session"
            )
        self._loads_left -= 1
        name = agent.add_peer(metadata)
        if name != self.names.client:
            raise InvalidRequest("metadata: the agent must take the name that OpenFabric gave it")
        whole = MemoryPiece(memory.address, memory.length_bytes, memory.device_id, memory.memory)
        if not agent.covers(name, whole):
            raise InvalidRequest("metadata: it does not cover the memory at address, length_bytes")
        self._loaded.add(memory)

    def _add_lent(self, agent: NixlAgent, memory: DeviceMemory, lost: Callable[[], None]) -> None:
        if memory not in self._lent:
            piece = MemoryPiece(
                memory.address, memory.length_bytes, memory.device_id, memory.memory
            )
            self._lent[memory] = _Lent(memory, agent.register(piece), lost)

    def _remove_lent(self, agent: NixlAgent, memory: DeviceMemory) -> None:
        lent = self._lent.pop(memory, None)
        if lent is not None:
            agent.unregister(lent.registered)

    def _end(self, agent: NixlAgent, error: ObjectCacheError) -> None:
        """Close the agent, then say of everything that was not done that it never will be."""
        with self._condition:
            self._error = error
            self._lost = not self._closed
            broken = self._when_broken if self._lost else None
            asked, self._asked = list(self._asked), deque()
        begun = [each for each in self._transfers if each.under_way is not None]
        rest = [*self._transfers, *asked]
        self._transfers.clear()
        for transfer in begun:
            assert transfer.under_way is not None
            agent.release(transfer.under_way)
        has_ended = agent.close()
        if not has_ended:
            self._withdraw(begun)
        lent = list(self._lent.values())
        self._lent.clear()
        for one in () if has_ended else lent:
            _tell(one.lost)
        if broken is not None:
            _tell(broken)
        for asked_one in rest:
            _tell(self._refuse, asked_one, error)

    def _withdraw(self, transfers: Iterable[_Transfer]) -> None:
        """Keep their staging memory out of use: it may still be read for this client."""
        staging = self._staging
        whole = memoryview(staging.memory)
        for transfer in transfers:
            begin = transfer.here.address - staging.address
            if 0 <= begin < staging.length_bytes:  # neither the probe nor what is lent
                staging.withdraw(whole[begin : begin + transfer.here.length_bytes])

    def __repr__(self) -> str:
        return f"<NixlPeer {len(self._transfers)} transfers under way>"


class NixlFabric(Fabric):
    """Makes peers; there is nothing that they share but the staging memory."""

    name = "nixl"

    def __init__(
        self, staging: StagingMemory, devices: str, ucx_settings: str, timeout: WriteTimeout
    ) -> None:
        """Raises `Unavailable` with what to install where the package is missing."""
        library()
        self._staging = staging
        self._devices = devices
        self._ucx_settings = ucx_settings
        self._timeout = timeout
        self._peers: weakref.WeakSet[NixlPeer] = weakref.WeakSet()

    def open(self, endpoint: bytes) -> tuple[FabricPeer, bytes]:
        secret = secrets.token_hex(8)
        names = NixlNames(client=f"client-{secret}", server=f"server-{secret}")
        peer = NixlPeer(self._staging, self._devices, self._ucx_settings, self._timeout, names)
        self._peers.add(peer)
        return peer, msgspec.msgpack.encode(names)

    def close(self) -> None:
        """Wait for the threads of all peers: the library must not be at work when the process
        ends.
        """
        for peer in list(self._peers):
            peer.close()
            peer.join(CLOSE_TIMEOUT_S)


def poll_pause_s(still_s: float) -> float:
    """How long to wait before the next look, when nothing has moved for so long."""
    return min(max(POLL_PAUSE_S, POLL_PAUSE_SHARE * still_s), POLL_PAUSE_MAX_S)


def _are_confused(one: RemoteMemory, other: RemoteMemory) -> bool:
    """Whether the library may look up pieces of one of them and find the other: it searches by the
    beginning, within one kind of memory of one device. The same memory again is what it was.
    """
    if (one.memory, one.device_id) != (other.memory, other.device_id):
        return False
    if (one.address, one.length_bytes) == (other.address, other.length_bytes):
        return False
    return (
        one.address < other.address + other.length_bytes
        and other.address < one.address + one.length_bytes
    )


def _tell(callback: Callable[..., None], *arguments: object) -> None:
    """Whoever fails to listen keeps nobody else from being told."""
    try:
        callback(*arguments)
    except Exception:
        logger.exception("somebody could not be told how a transfer ended")


def _gone() -> DeliveryFailed:
    return DeliveryFailed("the client's session has ended")


def _ignore(_: ObjectCacheError) -> None:
    """Nobody waits for it."""
