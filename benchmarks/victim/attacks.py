"""What hostile tenants do to a server, to be done while somebody else's requests are timed.

An attack is a number of peers, all carried by one process. A peer that is refused or cut comes
again at once: attackers do not give up.
"""

from __future__ import annotations

import multiprocessing
import secrets
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from multiprocessing.sharedctypes import SynchronizedArray
from multiprocessing.synchronize import Event
from typing import Self

from benchmarks.victim.signed_http import Signer
from objectcache_schemas.descriptor import DeliveryMode, Descriptor
from objectcache_schemas.limits import GIB, KIB
from objectcache_schemas.messages.frames import LENGTH

TICK_S = 0.05
KV_CHUNK_BYTES, KV_LAYERS = 4 * GIB, 64
PUT_RATE = 700e3  # bytes a second, well above storage.client_rate_bytes_per_s_min
AGAIN_S = 0.2  # until a peer that was refused or cut comes again
RECEIVE_BUFFER_BYTES = 16 * KIB  # of a slow reader's socket, so that its slowness is felt


class Peer(ABC):
    """One connection of an attacker."""

    receive_buffer_bytes = RECEIVE_BUFFER_BYTES  # 0: the system's default

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._socket: socket.socket | None = None
        self._again_s = 0.0
        self.times_lost = 0

    def step(self, now_s: float) -> None:
        """Go on; without waiting."""
        try:
            if self._socket is None:
                if now_s < self._again_s:
                    return
                self._socket = self._connected()
                self.begin(self._socket)
                self._socket.setblocking(False)
            self.go_on(self._socket, now_s)
        except BlockingIOError:
            return
        except OSError:
            self.times_lost += 1
            self._again_s = now_s + AGAIN_S
            self.close()

    @property
    def is_connected(self) -> bool:
        """Whether it has a connection."""
        return self._socket is not None

    def _connected(self) -> socket.socket:
        made = socket.socket()
        if self.receive_buffer_bytes:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self.receive_buffer_bytes)
        made.settimeout(5.0)
        try:
            made.connect(self._address)
        except BaseException:
            made.close()
            raise
        return made

    @abstractmethod
    def begin(self, connected: socket.socket) -> None:
        """Send what a new connection begins with. Raises `OSError`."""

    @abstractmethod
    def go_on(self, connected: socket.socket, now_s: float) -> None:
        """Do what the attack does from then on. Raises `OSError` where the connection ended."""

    def close(self) -> None:
        """End the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class SlowReader(Peer):
    """Gets an object and takes it at `rate_bytes_per_s`."""

    def __init__(self, signer: Signer, path: str, rate_bytes_per_s: float) -> None:
        super().__init__(signer.address)
        self._signer, self._path, self._rate = signer, path, rate_bytes_per_s
        self._last_s = 0.0

    def begin(self, connected: socket.socket) -> None:
        connected.sendall(self._signer.head("GET", self._path))
        self._last_s = time.monotonic()

    def go_on(self, connected: socket.socket, now_s: float) -> None:
        due_bytes = int((now_s - self._last_s) * self._rate)
        self._last_s = now_s
        while due_bytes > 0:
            data = connected.recv(due_bytes)
            if not data or data.startswith(b"HTTP/1.1 503"):
                raise ConnectionError("refused, or cut")
            due_bytes -= len(data)


class SteadyReader(SlowReader):
    """An honest client on a slow link: the system's buffers, and a rate above the least one."""

    receive_buffer_bytes = 0


class ThreeBytePut(Peer):
    """Begins a put and sends three bytes of it."""

    first_bytes = 3

    def __init__(self, signer: Signer, path: str, size_bytes: int = 1 * GIB) -> None:
        super().__init__(signer.address)
        self._signer, self._path, self._size_bytes = signer, path, size_bytes

    def begin(self, connected: socket.socket) -> None:
        connected.sendall(self._signer.head("PUT", self._path, self._size_bytes))
        connected.sendall(bytes(self.first_bytes))

    def go_on(self, connected: socket.socket, now_s: float) -> None:
        if connected.recv(4 * KIB) is not None:  # nothing is due but a refusal
            raise ConnectionError("refused, or cut")


class StalledPut(ThreeBytePut):
    """Begins a put and sends enough of it to have a slot, and no more."""

    first_bytes = 128 * KIB


class PacedPut(ThreeBytePut):
    """Begins a put of `size_bytes` and sends it at a rate that nobody is cut for."""

    def __init__(
        self, signer: Signer, path: str, size_bytes: int, rate_bytes_per_s: float = PUT_RATE
    ) -> None:
        super().__init__(signer, path, size_bytes)
        self._rate = rate_bytes_per_s
        self._begun_s = 0.0
        self._sent_bytes = 0

    def begin(self, connected: socket.socket) -> None:
        super().begin(connected)
        self._begun_s, self._sent_bytes = time.monotonic(), self.first_bytes

    def go_on(self, connected: socket.socket, now_s: float) -> None:
        due_bytes = min(int((now_s - self._begun_s) * self._rate), self._size_bytes)
        if due_bytes > self._sent_bytes:
            self._sent_bytes += connected.send(bytes(due_bytes - self._sent_bytes))
        super().go_on(connected, now_s)


class PacedKvPut(PacedPut):
    """The same with chunks of 4 GiB, up to `limits.payload_bytes_max`."""

    def begin(self, connected: socket.socket) -> None:
        count = self._size_bytes // KV_CHUNK_BYTES
        keys = tuple(secrets.token_hex(8) for _ in range(count))
        slice_bytes = KV_CHUNK_BYTES // KV_LAYERS
        chunks = Descriptor(keys, KV_LAYERS, 16, slice_bytes, DeliveryMode.CHUNKWISE)
        described = chunks.to_bytes()
        start = LENGTH.pack(len(described)) + described
        bucket = self._path.split("/")[1]
        length_bytes = len(start) + count * KV_CHUNK_BYTES
        connected.sendall(self._signer.head("POST", f"/{bucket}?kv-put", length_bytes) + start)
        self._begun_s, self._sent_bytes = time.monotonic(), 0


class Attack:
    """Peers that go on from entering to leaving, in a process of their own, so that it is not the
    victim's interpreter that is slow.
    """

    def __init__(self, peers: Sequence[Peer]) -> None:
        spawning = multiprocessing.get_context("spawn")  # a fork of threads may stand still
        self._ended = spawning.Event()
        self._counts = spawning.Array("q", 3)
        self._process = spawning.Process(
            target=_attack, args=(peers, self._ended, self._counts), name="attack", daemon=True
        )

    @property
    def connected(self) -> int:
        """How many peers have a connection."""
        return int(self._counts[0])

    @property
    def times_lost(self) -> int:
        """How often a peer was refused or cut."""
        return int(self._counts[1])

    @property
    def paused_s(self) -> float:
        """The longest time in which no peer did anything, as its process did not run."""
        return float(self._counts[2]) / 1e3

    def __enter__(self) -> Self:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._process.join()


def _attack(peers: Sequence[Peer], ended: Event, counts: SynchronizedArray[int]) -> None:
    last_s = time.monotonic()
    while not ended.wait(TICK_S):
        paused_s = time.monotonic() - last_s
        counts[2] = max(counts[2], int(1e3 * paused_s))
        last_s += paused_s
        for peer in peers:
            peer.step(time.monotonic())
        counts[0] = sum(peer.is_connected for peer in peers)
        counts[1] = sum(peer.times_lost for peer in peers)


NewTenant = Callable[[], tuple[Signer, str]]  # another attacker, and the path of a large object

READERS, READERS_RATE_BYTES_PER_S = 32, 2e6
PUTS_A_TENANT = 64


def slow_readers(new_tenant: NewTenant, tenant_count: int = 1) -> list[Peer]:
    """32 readers a tenant, which take 2 MB/s in all."""
    rate = READERS_RATE_BYTES_PER_S / READERS
    return [
        SlowReader(signer, path, rate)
        for signer, path in (new_tenant() for _ in range(tenant_count))
        for _ in range(READERS)
    ]


def three_byte_puts(new_tenant: NewTenant, tenant_count: int = 2) -> list[Peer]:
    """64 puts a tenant that send three bytes and stand still."""
    return [
        ThreeBytePut(signer, f"{path}-{number}")
        for signer, path in (new_tenant() for _ in range(tenant_count))
        for number in range(PUTS_A_TENANT)
    ]


def four_tenants_with_both(new_tenant: NewTenant) -> list[Peer]:
    """Four tenants, each with 32 slow readers and 64 puts."""
    return [*slow_readers(new_tenant, 4), *three_byte_puts(new_tenant, 4)]


def stalled_puts(
    new_tenant: NewTenant, tenant_count: int = 2, puts: int = PUTS_A_TENANT
) -> list[Peer]:
    """64 puts a tenant that stand still once they have a slot."""
    return [
        StalledPut(signer, f"{path}-{number}")
        for signer, path in (new_tenant() for _ in range(tenant_count))
        for number in range(puts)
    ]


def many_tenants(new_tenant: NewTenant) -> list[Peer]:
    """24 tenants, each with 6 readers that take 2 MB/s in all, and 6 puts that stand still."""
    rate = READERS_RATE_BYTES_PER_S / (24 * 6)
    readers = [
        SlowReader(signer, path, rate)
        for signer, path in (new_tenant() for _ in range(24))
        for _ in range(6)
    ]
    return [*readers, *stalled_puts(new_tenant, 24, 6)]


def declared_puts(new_tenant: NewTenant) -> list[Peer]:
    """Two tenants with a kv-put each, of 40 and of 24 GiB, sent well above the least rate.
    The store must take 64 GiB: else they are refused.
    """
    sizes = (40 * GIB, 24 * GIB)
    return [PacedKvPut(*new_tenant(), size_bytes) for size_bytes in sizes]


def nobody(new_tenant: NewTenant) -> list[Peer]:
    """No attack."""
    return []


ATTACKS: dict[str, Callable[[NewTenant], list[Peer]]] = {
    "none": nobody,
    "slow-readers": slow_readers,
    "three-byte-puts": three_byte_puts,
    "stalled-puts": stalled_puts,
    "four-tenants": four_tenants_with_both,
    "many-tenants": many_tenants,
    "declared-puts": declared_puts,
}
