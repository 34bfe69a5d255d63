"""What a client is told of routes, checked: which relays there are, and how one is chosen."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from objectcache.arguments import checked_seconds, checked_zero_or_more, listed
from objectcache.channel.credentials_file import check_not_for_all
from objectcache.channel.endpoint import Endpoint
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import MIB, NAME_PATTERN, ROUTE_WORDS

ROUTE_BYTES_MIN = 4 * MIB  # below, a relay's round trip costs more than its NIC gains
RELAYS_MAX = 256
REPLICAS_MAX = 8
FETCHER = "fetcher"  # what a client's own fetcher is called among its relays
_RELAY = "relay:"
_WORDS = ("auto", "direct", "split")


@dataclass(frozen=True, slots=True)
class RelayAddress:
    """A relay, and the node that it is called after."""

    node: str
    endpoint: Endpoint

    @classmethod
    def parse(cls, text: Any) -> RelayAddress:
        """`http://host:port`, called after its host and port, or `NODE=http://host:port`."""
        if not isinstance(text, str):
            raise InvalidRequest(f"relays must be strings, got {type(text).__name__}")
        before, slashes, after = text.partition("://")
        node, separator, scheme = before.rpartition("=")
        try:
            endpoint = Endpoint.parse(f"{scheme}{slashes}{after}")
        except InvalidRequest as error:
            raise InvalidRequest(f"relays: {error.message}") from error
        if separator and not re.match(NAME_PATTERN, node):
            raise InvalidRequest(
                f"relays: {text!r} must have 1 to 128 letters, digits and any of _.:@=+~- before "
                "its '='"
            )
        if node in ROUTE_WORDS:
            raise InvalidRequest(f"relays: {node!r} is the name of a route, and no relay's")
        return cls(node or f"{endpoint.host}:{endpoint.port}", endpoint)

    def is_called(self, name: str) -> bool:
        """Whether a route means this relay: by its node, its host and port, or its URL."""
        endpoint = self.endpoint
        return name in (self.node, f"{endpoint.host}:{endpoint.port}", endpoint.url)


@dataclass(frozen=True, slots=True)
class AskedRoute:
    """`auto`, `direct`, `split`, or `relay` and which one."""

    word: str
    relay: str = ""

    @classmethod
    def parse(cls, text: Any) -> AskedRoute:
        """Raises `InvalidRequest` for what is none of them."""
        if isinstance(text, str):
            if text in _WORDS:
                return cls(text)
            if text.startswith(_RELAY) and text != _RELAY:
                return cls("relay", text.removeprefix(_RELAY))
        allowed = ", ".join([*_WORDS, "relay:NODE"])
        raise InvalidRequest(f"route must be one of {allowed}, got {text!r}")

    def __str__(self) -> str:
        return f"{_RELAY}{self.relay}" if self.relay else self.word


@dataclass(frozen=True, slots=True)
class DispatchSource:
    """The dispatch service, by its replicas: `token` is asked at each call. `worker` is this
    engine's name there; empty: it is asked for relays, and not for routes.
    """

    endpoints: tuple[Endpoint, ...]
    token: Callable[[], str] = field(repr=False)
    worker: str = ""


@dataclass(frozen=True, slots=True)
class RouteSettings:
    """`node` is where this client runs, whose own relay brings it nothing; empty: not known.
    Deliveries under `bytes_min` go directly where the route is `auto`. `timeout_s` is how long a
    relay may be silent; None: twice the time that was predicted, and at least 0.5 s, or more where
    its rate is not known.
    """

    relays: tuple[RelayAddress, ...]
    route: AskedRoute
    node: str = ""
    bytes_min: int = ROUTE_BYTES_MIN
    timeout_s: float | None = None
    dispatch: DispatchSource | None = None

    @property
    def has_relays(self) -> bool:
        """Whether there are any, or may be."""
        return bool(self.relays) or self.dispatch is not None

    def check_route(self) -> None:
        """Raise `InvalidRequest` where the route needs a relay that there is not."""
        route = self.route
        if route.word in ("relay", "split") and not self.has_relays:
            raise InvalidRequest(f"route '{route}' needs relays, and there are none")
        is_known = self.dispatch is not None or any(
            one.is_called(route.relay) for one in self.relays
        )
        if route.relay and not is_known:
            known = ", ".join(one.node for one in self.relays)
            raise InvalidRequest(f"route: there is no relay {route.relay!r}; there are {known}")


def checked_routes(
    relays: Any,
    route: Any,
    node: Any,
    route_bytes_min: Any,
    relay_timeout_s: Any,
    dispatch: DispatchSource | None = None,
    fetcher: Any = "",
) -> RouteSettings:
    """The arguments of a client. A fetcher is a relay of this host, and the route where no other is
    named. Raises `InvalidRequest` naming the one that is wrong.
    """
    if isinstance(relays, str | bytes) or not isinstance(relays, Iterable):
        raise InvalidRequest(f"relays must be a list of URLs, got {relays!r}")
    addresses = tuple(RelayAddress.parse(one) for one in relays)  # pyright: ignore[reportUnknownVariableType]
    if fetcher:
        addresses = (*addresses, _fetcher_address(fetcher))
        route = f"{_RELAY}{FETCHER}" if route == "auto" else route
    if len(addresses) > RELAYS_MAX:
        raise InvalidRequest(f"relays must be at most {RELAYS_MAX}, got {len(addresses)}")
    names = [address.node for address in addresses]
    for name in names:
        if names.count(name) > 1:
            raise InvalidRequest(f"relays: {name!r} is there twice")
    urls = [address.endpoint.url for address in addresses]
    for url in urls:
        if urls.count(url) > 1:
            raise InvalidRequest(f"relays: {url} is there under two names")
    if not isinstance(node, str):
        raise InvalidRequest(f"node must be a string, got {type(node).__name__}")
    return RouteSettings(
        addresses,
        AskedRoute.parse(route),
        node,
        checked_zero_or_more("route_bytes_min", route_bytes_min),
        None if relay_timeout_s is None else checked_seconds("relay_timeout_s", relay_timeout_s),
        dispatch,
    )


def _fetcher_address(url: Any) -> RelayAddress:
    if not isinstance(url, str):
        raise InvalidRequest(f"fetcher must be a URL, got {type(url).__name__}")
    try:
        return RelayAddress(FETCHER, Endpoint.parse(url))
    except InvalidRequest as error:
        raise InvalidRequest(f"fetcher: {error.message}") from error


def checked_dispatch(dispatch: Any, token: Any, worker: Any) -> DispatchSource | None:
    """The arguments of a client that uses the dispatch service: `dispatch` is its URL, or those of
    its replicas, in a list or with commas between them; `token` is the file that holds it, or what
    gives it. Raises `InvalidRequest` naming the one that is wrong.
    """
    if not isinstance(worker, str):
        raise InvalidRequest(f"worker must be a string, got {type(worker).__name__}")
    if worker and not re.match(NAME_PATTERN, worker):
        raise InvalidRequest(
            f"worker must be 1 to 128 letters, digits and any of _.:@=+~-, got {worker!r}"
        )
    if not dispatch:
        if token is not None or worker:
            raise InvalidRequest("dispatch_token and worker need dispatch, the service's URL")
        return None
    endpoints = _replicas(dispatch)
    read: Callable[[], str]
    if isinstance(token, str | Path):
        read = _TokenFile(Path(token))
    elif callable(token):
        read = cast("Callable[[], str]", token)
    else:
        raise InvalidRequest("dispatch_token must name the file of the token, or be a callable")
    return DispatchSource(endpoints, read, worker)


def _replicas(dispatch: Any) -> tuple[Endpoint, ...]:
    urls: Any = listed(dispatch) if isinstance(dispatch, str) else dispatch
    if not isinstance(urls, list | tuple):
        raise InvalidRequest(
            "dispatch must be the service's URL, or those of its replicas in a list or with commas "
            f"between them, got {type(dispatch).__name__}"
        )
    if len(urls) > REPLICAS_MAX:  # pyright: ignore[reportUnknownArgumentType]
        raise InvalidRequest(f"dispatch must be at most {REPLICAS_MAX} URLs, got {len(urls)}")  # pyright: ignore[reportUnknownArgumentType]
    try:
        endpoints = [Endpoint.parse(one) for one in urls]  # pyright: ignore[reportUnknownVariableType]
    except InvalidRequest as error:
        raise InvalidRequest(f"dispatch: {error.message}") from error
    for one in endpoints:
        if endpoints.count(one) > 1:
            raise InvalidRequest(f"dispatch: {one.url} is there twice")
    return tuple(endpoints)


class _TokenFile:
    """Its token. Who puts another into it may be half done when it is read, or between removing it
    and writing it anew: the token before is used then. Raises `InvalidRequest` for what is wrong
    with the file at first, and whenever all on the host may read it.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._token = self._read()

    def __call__(self) -> str:
        with contextlib.suppress(_Unfinished):
            self._token = self._read()
        return self._token

    def _read(self) -> str:
        try:
            token = self._file.read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise _Unfinished(f"dispatch_token: {self._file} cannot be read: {error}") from error
        check_not_for_all("dispatch_token", self._file)
        if not token.isascii() or not token.isprintable() or not token:
            raise _Unfinished(f"dispatch_token: {self._file} must hold one line of visible ASCII")
        return token


class _Unfinished(InvalidRequest):
    """What whoever writes it may be about to mend."""
