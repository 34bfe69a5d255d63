"""A storage server whose store is silent for longer than its writer's lease, and then is not."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.figures.shaped_link import ShapedLink
from objectcache_schemas.errors import NotFound, Unavailable
from objectcache_schemas.messages.reads import ObjectOpened, OpenObject, SendBody
from objectcache_schemas.messages.writes import CommitPut, PutObject, SendData, Stored
from objectcache_schemas.operators.server_list import GetServers, Servers
from tests.ceph import CephCluster, ceph_cluster
from tests.ceph import reason_to_skip as ceph_missing
from tests.integration.served import BOUND_S, wait_until
from tests.integration.steady_clients import SteadyClients
from tests.integration.test_shared_store import BODIES, Conversing
from tests.partitions.cut_fleet import (
    OUTSIDE,
    CutFleet,
    cut,
    make_bucket,
    store_in_ceph,
    store_in_s3,
)
from tests.seaweedfs import S3Server, reason_to_skip, running_seaweedfs
from tests.storage_client import StorageClient

pytestmark = pytest.mark.timeout(400)

PIECE_BYTES = 1 << 20
BODY = os.urandom(24 * PIECE_BYTES)  # of several objects of the store
FENCED = "it is taken for dead"


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    if reason := reason_to_skip():
        pytest.skip(reason)
    with running_seaweedfs(bind="0.0.0.0") as server:
        make_bucket(server)
        yield server


@pytest.fixture(scope="module")
def ceph(link: ShapedLink) -> Iterator[CephCluster]:
    if reason := ceph_missing():
        pytest.skip(reason)
    with ceph_cluster(host=link.near_address) as cluster:
        yield cluster


@pytest.fixture
def fleet(request: pytest.FixtureRequest, link: ShapedLink, tmp_path: Path) -> Iterator[CutFleet]:
    """On a store in S3, where the test asks for no other."""
    if getattr(request, "param", "s3") == "ceph":
        store = store_in_ceph(request.getfixturevalue("ceph"))
    else:
        store = store_in_s3(request.getfixturevalue("s3"), link, uuid.uuid4().hex)
    with CutFleet(tmp_path, link, store) as running:
        yield running


@pytest.fixture
def direct(fleet: CutFleet) -> Iterator[StorageClient]:
    """A connection to the server that is cut off, as a gateway has them."""
    with StorageClient(fleet.servers[0].address) as client:
        client.socket.settimeout(BOUND_S)
        yield client


class Put:
    """One put at the server that is cut off, half of whose bytes are there."""

    def __init__(self, client: StorageClient, key: str) -> None:
        self._client = client
        client.ask(PutObject(bucket="cut", key=key, size_bytes=len(BODY)), SendData)
        self._pieces = [
            BODY[start : start + PIECE_BYTES] for start in range(0, len(BODY), PIECE_BYTES)
        ]
        for piece in self._pieces[: len(self._pieces) // 2]:
            client.send_piece(piece)

    def end(self) -> None:
        """Raises what the server answers instead of storing it."""
        self._client.send_data(self._pieces[len(self._pieces) // 2 :])
        self._client.ask(CommitPut(etag="etag"), Stored)


def writer(fleet: CutFleet, number: int) -> int:
    with StorageClient(fleet.servers[number].address) as client:
        return client.ask(GetServers(), Servers).answering.writer


def others(fleet: CutFleet) -> int:
    """How many servers the one outside hears of; one that was fenced is heard of again once it is
    in the log under its new number.
    """
    with StorageClient(fleet.servers[1].address) as client:
        return len(client.ask(GetServers(), Servers).others)


def wait_fenced(fleet: CutFleet, times: int = 1) -> None:
    wait_until(lambda: fleet.log(OUTSIDE).count(FENCED) >= times, "the writer to be fenced")


@pytest.mark.parametrize(
    ("fleet", "is_one_way"),
    [("s3", False), ("s3", True), ("ceph", False)],
    ids=["silent", "answers lost", "silent Ceph"],
    indirect=["fleet"],
)
def test_a_put_that_is_cut_is_told_so_and_leaves_nothing(
    fleet: CutFleet, direct: StorageClient, is_one_way: bool
) -> None:
    direct.create_bucket("cut")
    direct.put("cut", "before", BODY)
    before = writer(fleet, 0)
    put = Put(direct, "half")
    with cut(fleet.link, is_one_way=is_one_way):
        with pytest.raises(Unavailable):
            put.end()
        wait_fenced(fleet)
        wait_until(lambda: bool(fleet.health(0).degraded), "the health to say so")
        assert not fleet.health(1).degraded
    wait_until(lambda: not fleet.health(0).degraded, "the store to be asked again")
    assert writer(fleet, 0) != before
    for s3 in map(fleet.s3, fleet.endpoints):
        assert s3.get_object(Bucket="cut", Key="before")["Body"].read() == BODY
        keys = [one["Key"] for one in s3.list_objects_v2(Bucket="cut")["Contents"]]
        assert keys == ["before"]
    direct_again(fleet)


def direct_again(fleet: CutFleet) -> None:
    """The server that was cut off stores, without a restart, and the other one serves it."""
    with StorageClient(fleet.servers[0].address) as client:
        client.put("cut", "after", BODY)
    assert fleet.servers[0].process.returncode is None
    for s3 in map(fleet.s3, fleet.endpoints):
        assert s3.get_object(Bucket="cut", Key="after")["Body"].read() == BODY


def test_what_was_staged_before_the_writer_was_fenced_is_given_up(
    fleet: CutFleet, direct: StorageClient
) -> None:
    direct.create_bucket("cut")
    before = writer(fleet, 0)
    put = Put(direct, "staged")
    with cut(fleet.link, is_one_way=False):
        wait_fenced(fleet)
    wait_until(lambda: writer(fleet, 0) != before, "another writer number")
    with pytest.raises(Unavailable):
        put.end()
    for s3 in map(fleet.s3, fleet.endpoints):
        assert "Contents" not in s3.list_objects_v2(Bucket="cut")
    direct_again(fleet)


class Missing(Conversing):
    """An engine that takes a miss for what it is: a server that is cut off from the store answers
    for what it has replayed.
    """

    def _fetch_soon(self, turn: int) -> None:
        with contextlib.suppress(NotFound):
            self.fetch(turn)

    def check_all(self) -> None:
        for turn in self.stored:
            super()._fetch_soon(turn)
        assert self.wrong == 0


def opened(client: StorageClient) -> StorageClient:
    client.ask(OpenObject(bucket="cut", key="object"), ObjectOpened)
    return client


def read_body(client: StorageClient) -> bytes:
    """What comes of the opened object until it is whole, or the connection ends."""
    client.send(SendBody(offset_bytes=0, length_bytes=len(BODY), into_socket=False))
    data = bytearray()
    while len(data) < len(BODY) and (piece := client.socket.recv(PIECE_BYTES)):
        data += piece
    return bytes(data)


def test_a_get_that_is_cut_ends_and_serves_no_wrong_byte(
    fleet: CutFleet, direct: StorageClient
) -> None:
    direct.create_bucket("cut")
    direct.put("cut", "object", BODY)
    opened(direct)
    with cut(fleet.link, is_one_way=False):
        part = read_body(direct)
        assert len(part) < len(BODY)
        assert BODY.startswith(part)
        with StorageClient(fleet.servers[1].address) as outside:
            assert read_body(opened(outside)) == BODY
    wait_until(lambda: not fleet.health(0).degraded, "the store to be asked again")
    with StorageClient(fleet.servers[0].address) as healed:
        assert read_body(opened(healed)) == BODY


def test_nothing_acknowledged_is_lost_under_load(fleet: CutFleet) -> None:
    clients = SteadyClients(fleet.s3(), BODIES)
    engines = [Missing(fleet, one, "body", seed) for seed, one in enumerate(fleet.endpoints)]
    with clients, engines[0], engines[1]:
        for times in (1, 2):
            with cut(fleet.link, is_one_way=times == 2):
                wait_fenced(fleet, times)
            clients.wait_served(4)
            wait_until(lambda: not fleet.health(0).degraded, "the store to be asked again")
            wait_until(lambda: bool(others(fleet)), "the healed server to be entered in the log")
    assert set(clients.statuses) <= {200, 503}
    # A body that has begun when its store is cut off can only end short.
    assert set(clients.errors) <= {"IncompleteRead"}
    assert clients.wrong_bodies == 0
    for engine in engines:
        assert engine.stored
        engine.check_all()
    assert all(server.process.returncode is None for server in fleet.servers)
