"""A load of small S3 requests from a process of its own: `python -m benchmarks.s3.request_load`.

One thread, raw sockets, each connection with one request at a time. The requests are signed before
the clock starts, each for a key of its own, and sent again and again within the signatures' life.
It costs some ten microseconds a request, so that what is measured is the server. A specification
comes in on standard input as JSON, `signed` goes out, any line starts it, and the outcome goes out.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import re
import select
import socket
import sys
import time
from contextlib import ExitStack
from itertools import cycle
from typing import Self

import msgspec

RECEIVE_BYTES = 1 << 20
CONTENT_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
REGION = "us-east-1"


class Load(msgspec.Struct, frozen=True):
    """What to send: GET or PUT of `key_count` keys `BUCKET/PREFIX-N` for some seconds."""

    host: str
    port: int
    access_key: str
    secret_key: str
    method: str
    bucket: str
    prefix: str
    key_count: int
    body_bytes: int
    connections: int
    duration_s: float
    count_min: int = 0  # goes on until so many are answered


class Outcome(msgspec.Struct, frozen=True):
    """What came of it. Latencies are in seconds, `failed` are answers other than 200."""

    count: int
    failed: int
    received_bytes: int
    elapsed_s: float
    p50_s: float
    p99_s: float


def signed_request(load: Load, number: int, payload_sha256: str, amz_date: str) -> bytes:
    """The head of one request, with the headers that an SDK sends, signed in the header."""
    path = f"/{load.bucket}/{load.prefix}-{number:06d}"
    scope = f"{amz_date[:8]}/{REGION}/s3/aws4_request"
    named = {
        "host": f"{load.host}:{load.port}",
        "x-amz-content-sha256": payload_sha256,
        "x-amz-date": amz_date,
    }
    names = ";".join(named)
    lines = "".join(f"{name}:{value}\n" for name, value in named.items())
    request = f"{load.method}\n{path}\n\n{lines}\n{names}\n{payload_sha256}"
    digest = hashlib.sha256(request.encode()).hexdigest()
    key = f"AWS4{load.secret_key}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    text = f"AWS4-HMAC-SHA256\n{amz_date}\n{scope}\n{digest}"
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    head = [f"{load.method} {path} HTTP/1.1", *(f"{name}: {text}" for name, text in named.items())]
    head += [
        "accept-encoding: identity",
        "user-agent: objectcache-bench",
        f"authorization: AWS4-HMAC-SHA256 Credential={load.access_key}/{scope}, "
        f"SignedHeaders={names}, Signature={signature}",
    ]
    if load.method == "PUT":
        head.append(f"content-length: {load.body_bytes}")
    return "\r\n".join([*head, "", ""]).encode()


class Connection:
    """One connection with at most one request under way."""

    def __init__(self, load: Load) -> None:
        self.socket = socket.create_connection((load.host, load.port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.begun_s = 0.0
        self.to_send = memoryview(b"")
        self._head = b""
        self._left_bytes = -1  # of the body; -1: the head is not complete
        self.failed = False

    def begin(self, request: bytes) -> bool:
        """Send a request; true when all of it has left."""
        self.begun_s = time.perf_counter()
        self.to_send = memoryview(request)
        self._head, self._left_bytes = b"", -1
        return self.go_on()

    def go_on(self) -> bool:
        """Send more; true when all of it has left."""
        try:
            while self.to_send:
                self.to_send = self.to_send[self.socket.send(self.to_send) :]
        except BlockingIOError:
            return False
        return True

    def receive(self, buffer: memoryview) -> int:
        """Take what has arrived; returns the bytes. Raises `ConnectionError` at an early end."""
        count = self.socket.recv_into(buffer)
        if not count:
            raise ConnectionError("the server closed the connection")
        if self._left_bytes >= 0:
            self._left_bytes -= count
            return count
        self._head += bytes(buffer[:count])
        head, end, body = self._head.partition(b"\r\n\r\n")
        if end:
            match = CONTENT_LENGTH.search(head)
            self.failed = head[9:12] != b"200"
            self._left_bytes = (int(match[1]) if match else 0) - len(body)
        return count

    @property
    def is_answered(self) -> bool:
        """Whether the whole answer is there."""
        return self._left_bytes == 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def run(load: Load, requests: list[bytes]) -> Outcome:
    """Send for the time that is asked for, and wait for the last answers."""
    with ExitStack() as opened:
        connections = [opened.enter_context(Connection(load)) for _ in range(load.connections)]
        poll = opened.enter_context(select.epoll())
        return _run(load, requests, {each.socket.fileno(): each for each in connections}, poll)


def _run(
    load: Load, requests: list[bytes], connections: dict[int, Connection], poll: select.epoll
) -> Outcome:
    upcoming = cycle(requests)
    buffer = memoryview(bytearray(RECEIVE_BYTES))
    latencies_s: list[float] = []
    failed = received_bytes = 0
    begin_s = time.perf_counter()
    end_s = begin_s + load.duration_s
    for number, connection in connections.items():
        is_sent = connection.begin(next(upcoming))
        poll.register(number, select.EPOLLIN if is_sent else select.EPOLLIN | select.EPOLLOUT)
    busy = len(connections)
    while busy:
        for number, events in poll.poll():
            connection = connections[number]
            if events & select.EPOLLOUT and connection.go_on():
                poll.modify(number, select.EPOLLIN)
            if not events & select.EPOLLIN:
                continue
            received_bytes += connection.receive(buffer)
            if not connection.is_answered:
                continue
            now_s = time.perf_counter()
            latencies_s.append(now_s - connection.begun_s)
            failed += connection.failed
            if now_s >= end_s and len(latencies_s) >= load.count_min:
                busy -= 1
            elif not connection.begin(next(upcoming)):
                poll.modify(number, select.EPOLLIN | select.EPOLLOUT)
    elapsed_s = time.perf_counter() - begin_s
    latencies_s.sort()
    count = len(latencies_s)
    p50_s, p99_s = latencies_s[count // 2], latencies_s[count * 99 // 100]
    return Outcome(count, failed, received_bytes, elapsed_s, p50_s, p99_s)


def prepared(load: Load) -> list[bytes]:
    """All requests, signed now."""
    body = bytes(load.body_bytes) if load.method == "PUT" else b""
    payload_sha256 = hashlib.sha256(body).hexdigest()
    amz_date = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    return [
        signed_request(load, number, payload_sha256, amz_date) + body
        for number in range(load.key_count)
    ]


def main() -> int:
    """Entry point."""
    load = msgspec.json.decode(sys.stdin.readline(), type=Load)
    requests = prepared(load)
    print("signed", flush=True)
    sys.stdin.readline()
    print(msgspec.json.encode(run(load, requests)).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
