"""A gateway whose way to one of two storage servers is cut, in the middle of what they do.

What is under way there ends within the gateway's bounds, with an error or from the other server;
nothing waits for the link.
"""

from __future__ import annotations

import contextlib
import http.client
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import objectcache
from benchmarks.figures.shaped_link import ShapedLink
from objectcache_schemas.errors import Unavailable
from tests.integration.fleet import RunningFleet
from tests.integration.served import BOUND_S, wait_until
from tests.integration.test_several_storage_servers import fetched, fill
from tests.partitions.cut_fleet import CUT_OFF, cut
from tests.servers import ServerProcess

BODY = os.urandom(48 << 20)  # more than all buffers of the way hold
PIECE_BYTES = 1 << 20
TURNS = 12  # each goes to either server
HUNG_UP = (http.client.IncompleteRead, http.client.BadStatusLine, ConnectionError)


class FarFleet(RunningFleet):
    """Two storage servers with the same objects, the first of them behind the link. The first
    gateway knows both, the second one the first server alone.
    """

    def __init__(self, directory: Path, link: ShapedLink) -> None:
        self.link = link
        # A put whose gateway hung up while the link was cut is one that goes on, as far as the far
        # server knows: at its end it would wait for it.
        settings = ("storage.engine=files", "storage.drain_timeout_s=0.1")
        super().__init__(directory, 2, *settings, is_tls=True, gateways=0)
        self.far = f"{link.address}:{self.servers[0].port}"
        near = self.servers[1].address
        for addresses in ([self.far], [near]):
            endpoint = self.add_gateway(f"alone-{len(self.endpoints)}", addresses)
            with self.client(endpoint) as client:
                fill(client, self.s3(endpoint))
            self.s3(endpoint).put_object(Bucket="steady", Key="large", Body=BODY)
        self.both = self.add_gateway("both", [self.far, near])

    def link_bytes(self, operation: str) -> int:
        """What the link has carried in the direction of such a request's body."""
        if operation == "put_object":
            return self.link.inbound_bytes()
        counts = Path("/sys/class/net") / self.link.near_device / "statistics"
        return int((counts / "rx_bytes").read_text())

    @property
    def far_alone(self) -> str:
        """The gateway that knows the server behind the link alone."""
        return self.endpoints[0]

    def start(
        self,
        module: str,
        name: str,
        settings: Sequence[str],
        more: Mapping[str, str] | None = None,
        within: Sequence[str] = (),
    ) -> ServerProcess:
        """The far server listens at its own address, with a certificate for that."""
        if name != CUT_OFF:
            return super().start(module, name, settings, more, within)
        pair = self.authority.pair("far", host=self.link.address)
        port = next(one for one in settings if one.startswith("storage.listen")).rsplit(":", 1)[1]
        of_its_own = [
            f"storage.listen={self.link.address}:{port}",
            f"server.tls_certificate={pair.certificate}",
            f"server.tls_key={pair.key}",
        ]
        return super().start(module, name, [*settings, *of_its_own], more, self.link.within)


@pytest.fixture(scope="module")
def fleet(link: ShapedLink, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FarFleet]:
    with FarFleet(tmp_path_factory.mktemp("far"), link) as running:
        yield running


class Request:
    """A request over a connection of its own, read and sent when the test says so."""

    def __init__(self, s3: Any, operation: str, key: str) -> None:
        url = s3.generate_presigned_url(operation, {"Bucket": "steady", "Key": key})
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._path = f"{parts.path}?{parts.query}"
        self._is_get = operation == "get_object"
        self._http = http.client.HTTPConnection(parts.hostname, parts.port, timeout=BOUND_S)

    def begin(self) -> None:
        """A part of the body is on its way; of what is got it fills all buffers."""
        if self._is_get:
            self._http.request("GET", self._path)
            self._response = self._http.getresponse()
            assert self._response.status == 200
            assert self._response.read(PIECE_BYTES) == BODY[:PIECE_BYTES]
            return
        self._http.putrequest("PUT", self._path)
        self._http.putheader("Content-Length", str(len(BODY)))
        self._http.endheaders()
        self._http.send(BODY[: len(BODY) // 3])

    def is_whole(self) -> bool:
        """Whether the rest of what is got comes; what comes is right."""
        came = bytearray()
        with contextlib.closing(self._http), contextlib.suppress(*HUNG_UP):
            while piece := self._response.read(PIECE_BYTES):
                came += piece
        assert BODY[PIECE_BYTES:].startswith(came)
        return len(came) == len(BODY) - PIECE_BYTES

    def is_stored(self) -> bool:
        """Whether the rest of what is put is taken; otherwise 503 or the connection says so."""
        with contextlib.closing(self._http), contextlib.suppress(*HUNG_UP):
            self._http.send(BODY[len(BODY) // 3 :])
            status = self._http.getresponse().status
            assert status in (200, 503)
            return status == 200
        return False


def begin_far(fleet: FarFleet, operation: str) -> list[Request]:
    """Requests through the gateway that knows both, until one is served by the far server."""
    begun: list[Request] = []
    before = fleet.link_bytes(operation)
    while fleet.link_bytes(operation) - before < len(BODY) // 8:
        begun.append(Request(fleet.s3(fleet.both), operation, "large"))
        begun[-1].begin()
    return begun


@pytest.mark.parametrize("is_one_way", [False, True], ids=["silent", "requests lost"])
def test_what_is_under_way_ends_and_the_other_server_serves(
    fleet: FarFleet, is_one_way: bool
) -> None:
    gets = begin_far(fleet, "get_object")
    puts = begin_far(fleet, "put_object")
    with cut(fleet.link, is_one_way=is_one_way):
        whole = [one.is_whole() for one in gets]
        stored = [one.is_stored() for one in puts]
        assert not all(whole)
        assert not all(stored)
        with fleet.client(fleet.both) as client:
            for turn in range(TURNS):
                assert fetched(client, "body"), turn
        alone = fleet.client(fleet.far_alone, timeout_s=5.0)
        with alone, pytest.raises(Unavailable):
            fetched(alone, "body")
    wait_until(lambda: serves(fleet, fleet.far_alone), "the far server to be asked again")
    for one in (fleet.far_alone, fleet.both):
        body = fleet.s3(one).get_object(Bucket="steady", Key="large")["Body"]
        assert body.read() == BODY


def serves(fleet: FarFleet, endpoint: str) -> bool:
    try:
        with fleet.client(endpoint) as client:
            return fetched(client, "body")
    except objectcache.ObjectCacheError:
        return False
