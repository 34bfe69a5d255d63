"""What the dispatch service is told: that this node has a relay, where, and how busy it is.

The service keeps nothing on a disk, and may be away: the relay serves on without it, and registers
anew whenever the service does not know it. It hears nothing of the reservations.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import re
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import aiohttp
import msgspec

from objectcache_gateway.dispatch_service.token import read_token
from objectcache_relay.landing.landed_prefixes import Landings
from objectcache_relay.landing.node_name import node_of
from objectcache_runtime.networking.listening import HostPort
from objectcache_runtime.settings import RelaySettings
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.operators.admin_api import Problem
from objectcache_schemas.operators.dispatch_api import (
    RELAY_URL_PATTERN,
    LoadsReport,
    LoadsTaken,
    NodeRegistered,
    RelayRegistration,
    ReportedNode,
)

TIMEOUT_S = 5.0  # of one call
RETRY_S = 1.0
TOLD_EVERY_S = 30.0  # that the service is away
ANSWER_BYTES_MAX = 1 << 20
BYTES_PER_GBIT = 1e9 / 8
NO_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
FAILURES = (OSError, aiohttp.ClientError, TimeoutError, InvalidRequest, *NO_JSON)

logger = logging.getLogger("objectcache.relay.dispatch_report")


@dataclass(frozen=True, slots=True)
class DispatchTarget:
    """What is told, and to whom. `urls` are of the service's replicas."""

    urls: tuple[str, ...]
    token: str
    node: str
    registration: RelayRegistration
    report_s: float

    @classmethod
    def of(cls, relay: RelaySettings, listening: HostPort, scheme: str) -> DispatchTarget | None:
        """None where relay.dispatch is not set. Raises `InvalidRequest` naming what is wrong."""
        if not relay.dispatch:
            return None
        urls = tuple(url.strip().rstrip("/") for url in relay.dispatch.split(","))
        for url in urls:
            if not re.match(RELAY_URL_PATTERN, url):
                raise InvalidRequest(
                    f"relay.dispatch must be http://HOST:PORT or https://HOST:PORT, several with "
                    f"commas between them, got {url!r}"
                )
        if not relay.dispatch_token_file:
            raise InvalidRequest(
                "relay.dispatch is set, so relay.dispatch_token_file must be, too: the service "
                "lets in whoever has its token"
            )
        for name in ("storage_nic_gbps", "compute_nic_gbps"):
            if not getattr(relay, name):
                raise InvalidRequest(
                    f"relay.dispatch is set, so relay.{name} must be, too: routes are chosen by it"
                )
        node = node_of(relay)
        registration = RelayRegistration(
            relay=_own_url(relay, listening, scheme),
            storage_nic_bytes_per_s=relay.storage_nic_gbps * BYTES_PER_GBIT,
            compute_nic_bytes_per_s=relay.compute_nic_gbps * BYTES_PER_GBIT,
            compute_nics=relay.compute_nics,
            landing_bytes=relay.landing_bytes,
        )
        token = read_token(Path(relay.dispatch_token_file), "relay.dispatch_token_file")
        return cls(urls, token, node, registration, relay.report_s)


def _own_url(relay: RelaySettings, listening: HostPort, scheme: str) -> str:
    if not relay.url and is_everywhere(listening.host):
        raise InvalidRequest(
            "relay.dispatch is set and relay.listen names no host, so relay.url must be set: "
            "engines are told it"
        )
    url = relay.url or f"{scheme}://{listening}"
    if not re.match(RELAY_URL_PATTERN, url):
        raise InvalidRequest(f"relay.url must be {scheme}://HOST:PORT, got {url!r}")
    return url


def is_everywhere(host: str) -> bool:
    """Whether one listens there on every interface."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_unspecified
    return not host


def _told(answer: bytes) -> str:
    try:
        return msgspec.json.decode(answer, type=Problem).message
    except NO_JSON:
        return repr(answer[:500])


class DispatchReporter:
    """Tells one replica, from `start` to `stop`."""

    def __init__(
        self,
        target: DispatchTarget,
        url: str,
        landings: Landings,
        tls: ssl.SSLContext | None,
        can_serve: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """While the relay cannot serve (`can_serve`), it is not registered."""
        self._target = target
        self._url = url
        self._path = f"/v1/nodes/{quote(target.node)}/relay"
        self._landings = landings
        self._tls = tls
        self._can_serve = can_serve
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_registered = False
        self._told_s: float | None = None

    def start(self) -> None:
        """Begin; returns at once."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=1, ssl=self._tls or True),
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
            headers={"Authorization": f"Bearer {self._target.token}"},
        )
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Say that the relay goes, and end."""
        if self._task is None or self._session is None:
            return
        self._task.cancel()
        await asyncio.wait([self._task])
        try:
            await self._leave()
        except FAILURES as error:
            logger.info("%s was not told that the relay ends: %s", self._url, error)
        await self._session.close()

    async def _run(self) -> None:
        while True:
            try:
                if self._can_serve():
                    await self._report()
                    self._landings.counts.reports.add("ok")
                else:
                    await self._leave()
            except FAILURES as error:
                self._failed(error)
                await asyncio.sleep(RETRY_S)
            else:
                if self._told_s is not None:
                    logger.info("the dispatch service %s answers again", self._url)
                    self._told_s = None
                await asyncio.sleep(self._target.report_s)

    def _failed(self, error: Exception) -> None:
        self._is_registered = False
        self._landings.counts.reports.add("failed")
        now_s = self._clock()
        if self._told_s is None or now_s - self._told_s >= TOLD_EVERY_S:
            self._told_s = now_s
            logger.warning(
                "the dispatch service %s is not told of this relay, which serves on: %s",
                self._url,
                str(error) or type(error).__name__,
            )

    async def _leave(self) -> None:
        """Be registered no more."""
        if self._is_registered:
            await self._call("DELETE", self._path)
            self._is_registered = False

    async def _report(self) -> None:
        if not self._is_registered:
            body = msgspec.json.encode(self._target.registration)
            answer = await self._call("PUT", self._path, body)
            registered = msgspec.json.decode(answer, type=NodeRegistered)
            if registered.lease_s <= self._target.report_s:
                raise InvalidRequest(
                    f"its lease is {registered.lease_s:g} s (dispatch.node_lease_s), "
                    f"relay.report_s {self._target.report_s:g} s"
                )
            self._is_registered = True
        report = LoadsReport(nodes=(self._load(),))
        answer = await self._call("POST", "/v1/loads", msgspec.json.encode(report))
        if self._target.node in msgspec.json.decode(answer, type=LoadsTaken).unknown:
            self._is_registered = False  # it was restarted, or another relay has the name

    def _load(self) -> ReportedNode:
        landings = self._landings
        return ReportedNode(
            node=self._target.node,
            read_queue_bytes=landings.read_queue_bytes,
            landing_bytes_used=landings.grants.granted_bytes,
            rate_bytes_per_s=landings.rate_bytes_per_s or None,
            relay=self._target.registration.relay,
        )

    async def _call(self, method: str, path: str, body: bytes | None = None) -> bytes:
        assert self._session is not None
        async with self._session.request(
            method, self._url + path, data=body, allow_redirects=False
        ) as answer:
            data = await answer.content.read(ANSWER_BYTES_MAX)
            if answer.status >= 300:
                raise InvalidRequest(f"HTTP status {answer.status}: {_told(data)}")
            return data

    def __repr__(self) -> str:
        return f"<DispatchReporter of {self._target.node} to {self._url}>"
