"""The replicas of the dispatch service, of which one that answers is asked."""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from objectcache.channel.connections import ConnectionPool
from objectcache.channel.endpoint import Endpoint
from objectcache.channel.http_channel import HttpChannel, Reply
from objectcache.channel.requests import GatewayRequest
from objectcache.pause import Pause
from objectcache_schemas.errors import InvalidRequest, NotFound, ObjectCacheError, Unavailable

CONNECTIONS_MAX = 3  # to each replica: one takes 4,096, of all clients
TIMEOUT_S = 5.0
TOLD_EVERY_S = 30.0  # that a replica is away

logger = logging.getLogger("objectcache.routes.dispatch_client")

T = TypeVar("T")

Kind = str  # of calls: whoever lists relays may refuse to choose routes
Blamed = Callable[[Exception], str]  # what to say in the log of an argument that was refused


class _BearerSigner:
    def __init__(self, endpoint: Endpoint, token: Callable[[], str]) -> None:
        self._host, self._token = endpoint.host_header, token

    def signed_headers(self, request: GatewayRequest) -> dict[str, str]:
        return {
            **request.headers,
            "host": self._host,
            "authorization": f"Bearer {self._token_now()}",
            "content-type": "application/json",
        }

    def _token_now(self) -> str:
        """Raises `InvalidRequest` for whatever the caller's callable raises, or gives in place of
        a token: no delivery fails for it.
        """
        try:
            token = self._token()
        except InvalidRequest:
            raise
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            raise InvalidRequest(f"dispatch_token raised {told}") from error
        if not isinstance(token, str) or not token.isascii() or not token.isprintable():  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidRequest("dispatch_token must give a text of visible ASCII characters")
        return token


@dataclass(eq=False, slots=True)
class DispatchReplica:
    """One of them. `is_away`: it was out of reach, and no delivery waits for it before it has
    answered something that nobody waits for.
    """

    pool: ConnectionPool
    channel: HttpChannel
    pause: Pause = field(default_factory=Pause)
    is_away: bool = False
    told_s: float = float("-inf")


class DispatchReplicas:
    """One is asked until it is of no help, then the next in the order in which they were named.
    Thread-safe.
    """

    def __init__(
        self, endpoints: Sequence[Endpoint], token: Callable[[], str], tls: ssl.SSLContext | None
    ) -> None:
        self._lock = threading.Lock()
        self._replicas = [_replica(one, token, tls) for one in endpoints]
        self._first = 0  # to ask
        self._is_closed = False

    @property
    def may_be_back(self) -> bool:
        """Whether one that was away should be asked again by whoever can wait."""
        with self._lock:
            now_s = time.monotonic()
            return any(one.is_away and one.pause.rest_s(now_s) == 0 for one in self._replicas)

    @property
    def may_be_asked(self) -> bool:
        """Whether any is not left alone."""
        with self._lock:
            now_s = time.monotonic()
            return any(one.pause.rest_s(now_s) == 0 for one in self._replicas)

    def call(
        self,
        kind: Kind,
        request: GatewayRequest,
        timeout_s: float,
        blamed: Blamed,
        read: Callable[[DispatchReplica, Reply], T],
    ) -> T | None:
        """What `read` makes of the first answer that it takes; None where nobody gives one, which
        is logged. Each replica has `timeout_s`; one that is away is not asked.
        """
        for replica in self.to_ask(can_wait=False):
            if (
                answer := self.call_one(replica, kind, request, timeout_s, blamed, read)
            ) is not None:
                return answer
        return None

    def call_one(
        self,
        replica: DispatchReplica,
        kind: Kind,
        request: GatewayRequest,
        timeout_s: float,
        blamed: Blamed,
        read: Callable[[DispatchReplica, Reply], T],
        *,
        may_be_gone: bool = False,
    ) -> T | None:
        """The answer of this one, as `call`: `read` raises `InvalidRequest` for one that makes no
        sense, which is of no help. With `may_be_gone` it is no failure that what the request names
        is not there any more.
        """
        try:
            reply = replica.channel.call(request, timeout_s)
            with self._lock:
                replica.is_away = False
            answer = read(replica, reply)
        except ObjectCacheError as error:
            if may_be_gone and isinstance(error, NotFound):
                return None
            what = f"{request.method} {request.path}{blamed(error)}"
            self.failed(replica, kind, what, error)
            return None
        with self._lock:
            replica.pause.answered(kind)
        return answer

    def failed(self, replica: DispatchReplica, kind: Kind, what: str, error: Exception) -> None:
        """It was of no help: it is left alone for a while."""
        with self._lock:
            now_s = time.monotonic()
            replica.pause.failed(kind, now_s)
            replica.is_away |= isinstance(error, Unavailable)
            if replica is self._replicas[self._first]:
                self._first = (self._first + 1) % len(self._replicas)
            tells = now_s - replica.told_s >= TOLD_EVERY_S and not self._is_closed
            if tells:
                replica.told_s = now_s
        if tells:
            url = replica.pool.url
            logger.warning("the dispatch service %s is of no help (%s): %s", url, what, error)

    def prefer(self, replica: DispatchReplica) -> None:
        """It is of more help than those before it."""
        with self._lock:
            self._first = self._replicas.index(replica)

    def to_ask(self, *, can_wait: bool) -> list[DispatchReplica]:
        """Those that are not left alone, in the order in which they are to be asked: who is away is
        asked only by a caller who `can_wait`, and last then.
        """
        with self._lock:
            now_s = time.monotonic()
            turned = [*self._replicas[self._first :], *self._replicas[: self._first]]
            askable = [one for one in turned if one.pause.rest_s(now_s) == 0]
            here = [one for one in askable if not one.is_away]
            return [*here, *(one for one in askable if one.is_away)] if can_wait else here

    def __iter__(self) -> Iterator[DispatchReplica]:
        """In the order in which they were named."""
        return iter(self._replicas)

    def __len__(self) -> int:
        return len(self._replicas)

    def close(self) -> None:
        """End the connections. Repeating has no effect."""
        self._is_closed = True
        for one in self._replicas:
            one.pool.close()

    def __repr__(self) -> str:
        return f"<DispatchReplicas {', '.join(one.pool.url for one in self._replicas)}>"


def _replica(
    endpoint: Endpoint, token: Callable[[], str], tls: ssl.SSLContext | None
) -> DispatchReplica:
    pool = ConnectionPool(endpoint, CONNECTIONS_MAX, tls)
    return DispatchReplica(pool, HttpChannel(pool, _BearerSigner(endpoint, token), TIMEOUT_S))
