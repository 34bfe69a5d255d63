"""A link to a relay, or from one, that can be cut, or is slow: a TCP proxy in this process."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from typing import Self
from urllib.parse import urlsplit

CHUNK_BYTES = 64 << 10
SLOW_CHUNK_BYTES = 4 << 10
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: what is left is not sent, and the peer is told at once


class CutLink:
    """Passes connections on to a relay, or what else is at the URL. `reset` ends all of them, and
    refuses others, as a host that went down and is up again would; `silence` lets nothing pass any
    more, and tells nobody.
    """

    def __init__(
        self, url: str, answer_bytes_per_s: float | None = None, host: str = "127.0.0.1"
    ) -> None:
        """`answer_bytes_per_s` is what each connection has at most of what comes from there; `host`
        is where it listens.
        """
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._relay = (parts.hostname, parts.port)
        self._answer_bytes_per_s = answer_bytes_per_s
        self._listener = socket.create_server((host, 0))
        self.url = f"http://{host}:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._ends: list[socket.socket] = []
        self._is_silent = False
        self._is_closed = False
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def silence(self) -> None:
        """From now on bytes are lost, of new connections as well."""
        self._is_silent = True

    def reset(self) -> None:
        """End every connection now, and take no other."""
        with self._lock:
            self._is_closed = True
            ends, self._ends = self._ends, []
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # which wakes the thread that accepts
        self._listener.close()
        for end in ends:
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                end.shutdown(socket.SHUT_RDWR)  # which wakes whoever reads it
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                engine, _ = self._listener.accept()
                relay = socket.create_connection(self._relay)
                with self._lock:
                    if self._is_closed:
                        engine.close()
                        relay.close()
                        return
                    self._ends += [engine, relay]
                    rate = self._answer_bytes_per_s
                    both = ((engine, relay, None), (relay, engine, rate))
                    new = [threading.Thread(target=self._pass, args=one) for one in both]
                    self._threads += new
                for thread in new:
                    thread.start()

    def _pass(
        self, source: socket.socket, target: socket.socket, rate_bytes_per_s: float | None
    ) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(SLOW_CHUNK_BYTES if rate_bytes_per_s else CHUNK_BYTES):
                if rate_bytes_per_s:
                    time.sleep(len(data) / rate_bytes_per_s)
                if not self._is_silent:
                    target.sendall(data)
        if not self._is_silent:
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_WR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.reset()
        for thread in self._threads:
            thread.join()
