"""Clients at work while servers are restarted under them.

They count what LMCache's S3 connector counts: errors of the connection, three of which in a row
disable it. They do not retry, so that each error shows. Only a connection on which they were silent
for a while may be closed without one, as a server that stops does with those that seem idle.
"""

from __future__ import annotations

import contextlib
import http.client
import ssl
import threading
import time
from collections import Counter
from typing import Any, Self
from urllib.parse import urlsplit

from tests.integration.served import BOUND_S

ERRORS_IN_A_ROW_MAX = 3
PAUSE_S = 0.01  # between two turns: the servers need the processor, too
IDLE_S = 0.1  # a busy machine may keep a client from its turn for longer than the pause


class SteadyClient:
    """One connection, kept alive, on which GETs and PUTs of one object take turns."""

    def __init__(self, get_url: str, put_url: str, body: bytes, tls: ssl.SSLContext | None) -> None:
        self.statuses: Counter[int] = Counter()
        self.errors: list[str] = []
        self.wrong_bodies = 0
        self.is_disabled = False
        self._silent_since_s = 0.0
        self.served = 0  # requests that were answered, whatever the status
        self._requests = (("GET", get_url, None), ("PUT", put_url, body))
        self._body = body
        parts = urlsplit(get_url)
        host, port = parts.hostname or "", parts.port
        self._http = (
            http.client.HTTPConnection(host, port, timeout=BOUND_S)
            if tls is None
            else http.client.HTTPSConnection(host, port, timeout=BOUND_S, context=tls)
        )

    def run(self, stop: threading.Event) -> None:
        """Send requests until `stop`, or until it disables itself."""
        in_a_row = 0
        while not stop.is_set() and not self.is_disabled:
            try:
                self._turn()
                in_a_row = 0
            except (OSError, http.client.HTTPException) as error:
                self.errors.append(type(error).__name__)
                self._http.close()
                in_a_row += 1
                self.is_disabled = in_a_row >= ERRORS_IN_A_ROW_MAX
            stop.wait(PAUSE_S)
        self._http.close()

    def _turn(self) -> None:
        for method, url, body in self._requests:
            response = self._response(method, url, body)
            answer = response.read()
            self._silent_since_s = time.monotonic()
            self.statuses[response.status] += 1
            self.served += 1
            if method == "GET" and response.status == 200 and answer != self._body:
                self.wrong_bodies += 1

    def _response(self, method: str, url: str, body: bytes | None) -> http.client.HTTPResponse:
        parts = urlsplit(url)
        path = f"{parts.path}?{parts.query}"
        is_used = self._http.sock is not None
        sent_s: float | None = None
        try:
            self._http.request(method, path, body)
            sent_s = time.monotonic()
            return self._http.getresponse()
        except (ConnectionResetError, BrokenPipeError, ssl.SSLEOFError):
            silent_s = (sent_s or time.monotonic()) - self._silent_since_s
            if not is_used or silent_s < IDLE_S:
                raise
        self._http.close()
        self._http.request(method, path, body)
        return self._http.getresponse()


class SteadyClients:
    """Several of them, in threads; each has an object of its own."""

    def __init__(self, s3: Any, bodies: list[bytes], tls: ssl.SSLContext | None = None) -> None:
        with contextlib.suppress(s3.exceptions.BucketAlreadyOwnedByYou):
            s3.create_bucket(Bucket="steady")
        self.clients: list[SteadyClient] = []
        for number, body in enumerate(bodies):
            named = {"Bucket": "steady", "Key": f"object-{number}"}
            s3.put_object(**named, Body=body)
            urls = [s3.generate_presigned_url(do, named) for do in ("get_object", "put_object")]
            self.clients.append(SteadyClient(urls[0], urls[1], body, tls))
        s3.close()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=client.run, args=(self._stop,)) for client in self.clients
        ]

    def wait_served(self, more: int) -> None:
        """Wait until each client has had `more` answers from now on, or has disabled itself."""
        wanted = [client.served + more for client in self.clients]
        pause = threading.Event()
        for client, count in zip(self.clients, wanted, strict=True):
            while client.served < count and not client.is_disabled:
                pause.wait(0.01)

    @property
    def errors(self) -> list[str]:
        """All errors of all connections."""
        return [error for client in self.clients for error in client.errors]

    @property
    def statuses(self) -> Counter[int]:
        """How many answers had which status."""
        return sum((client.statuses for client in self.clients), Counter())

    @property
    def any_disabled(self) -> bool:
        """Whether some client has given up."""
        return any(client.is_disabled for client in self.clients)

    @property
    def wrong_bodies(self) -> int:
        """Answers that were whole and wrong."""
        return sum(client.wrong_bodies for client in self.clients)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        self.wait_served(4)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(BOUND_S)
