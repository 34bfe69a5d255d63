"""Sends raw bytes on sockets, many connections at once, and judges what comes back.

Every connection must be answered or closed within `BOUND_S`, no answer may be a defect of the
server, and the servers must hold no more afterwards than after the warm-up.
"""

from __future__ import annotations

import asyncio
import random
import re
import socket
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

import msgspec

from objectcache_schemas.conversations import StorageReply
from objectcache_schemas.limits import Limits
from objectcache_schemas.messages.frames import LENGTH, encode_frame
from objectcache_schemas.messages.handshake import Hello
from objectcache_schemas.messages.message import PROTOCOL_VERSION
from objectcache_schemas.messages.sessions import CreateSession, JoinSession, SessionTicket
from tests.fuzz.campaign import FAILURES_MAX, Failure, Outcome
from tests.fuzz.frame_seeds import GATEWAY_KINDS, TARGET_KINDS, encoded, sample
from tests.fuzz.http_requests import RequestMaker
from tests.fuzz.mutation import mutated, random_for
from tests.fuzz.servers import Servers

BOUND_S = 20.0
QUIET_S = 0.3  # of a connection that waits for more; its end is shown to it then
CONNECTIONS = 32
ANSWER_BYTES_MAX = 8 << 20
# 501 and 503 say what they mean; any other 5xx is a defect.
_KIND = re.compile(rb"(?:HTTP/1\.[01] |\xa2op.)(\d\d\d|[A-Z][A-Za-z]+)")
_DEFECT = re.compile(rb"HTTP/1\.[01] 5(?!01|03)\d\d[^\r]*")

Attack = Callable[[random.Random], Awaitable["Judged"]]
Judged = tuple[int, bytes, bytes, str]  # inputs, what was sent, its answer, what is wrong


class HttpAttack:
    """Raw requests on the gateway's port."""

    part = "http"

    def __init__(self, servers: Servers) -> None:
        running = servers.running
        self._address = (running.host, running.port)
        host = f"{running.host}:{running.port}"
        self._maker = RequestMaker(host, servers.access_key, servers.secret_key)

    async def __call__(self, rng: random.Random) -> Judged:
        """One connection."""
        pieces = self._maker.sequence(rng)
        half_closes = rng.random() < 0.98
        reader, writer = await asyncio.open_connection(*self._address)
        sent = b"".join(pieces)
        answered, wrong = await _converse(reader, writer, pieces, half_closes)
        defect = _DEFECT.search(answered)
        return len(pieces), sent, answered, defect[0].decode() if defect else wrong


class FrameAttack:
    """Frames on one of the storage server's sockets."""

    def __init__(self, servers: Servers, part: str) -> None:
        self.part = part
        run_dir = servers.running.run_dir
        self._storage_path = str(run_dir / "storage.sock")
        self._path = self._storage_path if part == "storage" else str(run_dir / "targets.sock")
        self._kinds = GATEWAY_KINDS if part == "storage" else TARGET_KINDS
        hello = Hello(v=PROTOCOL_VERSION, limits_fingerprint=Limits().fingerprint())
        self._hello = encode_frame(hello)

    async def __call__(self, rng: random.Random) -> Judged:
        """One connection: the handshake, then messages that are right in form, or not even that."""
        count = rng.choice((1, 1, 2, 3, 5))
        pieces = [encoded(sample(rng, rng.choice(self._kinds))) for _ in range(count)]
        if rng.random() < 0.4:
            pieces = [mutated(rng, [piece]) for piece in pieces]
        if rng.random() < 0.3:  # the data of a put, and its end
            pieces += [(4).to_bytes(4, "big") + b"data", bytes(4), rng.randbytes(9)]
        start = await self._start() if rng.random() < 0.97 else b""
        reader, writer = await asyncio.open_unix_connection(self._path)
        answered, wrong = await _converse(reader, writer, [start, *pieces], half_closes=True)
        return count, start + b"".join(pieces), answered, wrong

    async def _start(self) -> bytes:
        """What opens a connection: a greeting, or a ticket to join a session with."""
        if self.part == "storage":
            return self._hello
        reader, writer = await asyncio.open_unix_connection(self._storage_path)
        writer.write(self._hello + encode_frame(CreateSession(identity="root")))
        decoder = msgspec.msgpack.Decoder(StorageReply)
        replies = []
        for _ in range(2):
            (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            replies.append(decoder.decode(await reader.readexactly(length)))
        writer.transport.abort()
        ticket = replies[1].ticket if isinstance(replies[1], SessionTicket) else b""
        return encode_frame(JoinSession(v=PROTOCOL_VERSION, ticket=ticket))


async def _converse(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    pieces: Iterable[bytes],
    half_closes: bool,
) -> tuple[bytes, str]:
    """Send, and receive until the server closes; or only until it is silent."""
    answered = bytearray()
    wrong = ""
    try:
        async with asyncio.timeout(BOUND_S):
            with suppress(ConnectionError):
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                await _receive(reader, answered, QUIET_S)
                if half_closes:
                    writer.write_eof()
                await _receive(reader, answered, BOUND_S)
    except TimeoutError:
        wrong = f"neither closed nor answered within {BOUND_S} s"
    except OSError:
        pass
    writer.transport.abort()
    return bytes(answered), wrong


def _kinds(answered: bytes) -> Iterable[str]:
    """Status codes, or names of messages."""
    return (kind.decode() for kind in _KIND.findall(answered))


async def _receive(reader: asyncio.StreamReader, answered: bytearray, silence_s: float) -> None:
    """Take what comes until the end, or until nothing has come for `silence_s`."""
    with suppress(TimeoutError):
        while len(answered) < ANSWER_BYTES_MAX:
            async with asyncio.timeout(silence_s):
                data = await reader.read(1 << 16)
            if not data:
                return
            answered += data


def attack(servers: Servers, part: str, seed: int, indices: range) -> Outcome:
    """Run the inputs of a part against running servers."""
    outcome = Outcome(part)
    aim: HttpAttack | FrameAttack = (
        HttpAttack(servers) if part == "http" else FrameAttack(servers, part)
    )
    begun_s = time.monotonic()
    asyncio.run(_attack(aim, outcome, seed, iter(indices)))
    outcome.elapsed_s = time.monotonic() - begun_s
    return outcome


async def _attack(
    aim: HttpAttack | FrameAttack, outcome: Outcome, seed: int, indices: Iterable[int]
) -> None:
    async def work() -> None:
        for index in indices:
            if len(outcome.failures) >= FAILURES_MAX:
                return
            try:
                count, sent, answered, wrong = await aim(random_for(seed, aim.part, index))
            except (ConnectionError, socket.gaierror) as error:
                count, sent, answered, wrong = (
                    1,
                    b"",
                    b"",
                    f"cannot connect: {type(error).__name__}",
                )
            outcome.inputs += count
            outcome.answers.update(_kinds(answered))
            if wrong:
                outcome.failures.append(Failure(aim.part, seed, index, wrong, sent))

    await asyncio.gather(*(work() for _ in range(CONNECTIONS)))
