"""Quotas over HTTP, and the schedule's shares, which go by the user's name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from objectcache_schemas.descriptor import DeliveryMode, Descriptor
from objectcache_schemas.limits import Limits
from objectcache_schemas.messages.quotas import GetUsage, Usage
from objectcache_schemas.operators.schedule import (
    GetSchedule,
    ScheduleChanges,
    ScheduleState,
    SetSchedule,
    TenantShare,
)
from objectcache_schemas.records import Quota
from tests.integration.served import wait_until
from tests.integration.tenants import Tenant, new_tenant, set_bucket_quota
from tests.s3_clients import (
    Answer,
    call,
    open_socket,
    receive_answer,
    send_head,
    signed_headers,
)
from tests.servers import RunningServer, start_server
from tests.storage_client import StorageClient

KIB, MIB = 1 << 10, 1 << 20
LARGE_BYTES = 64 * MIB  # more than sockets and grants hold, so it is delivered while it is read


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose tenants are refused and do not wait."""
    with start_server(
        tmp_path_factory.mktemp("quotas"), "storage.engine=memory", "scheduler.queue_max=0"
    ) as running:
        yield running


def limited(server: RunningServer, **quota: float) -> tuple[Tenant, str]:
    """A user with a quota, and its bucket, which was made before the quota was."""
    tenant = new_tenant(server, "limited")
    bucket = tenant.new_bucket()
    tenant.change_user(quota=Quota(**quota))  # type: ignore[arg-type]  # fields by their names
    return tenant, bucket


def is_exceeded(answer: Answer) -> bool:
    return (answer.status, answer.code) == (403, "QuotaExceeded")


def put_body(*keys: str, chunk_bytes: int) -> bytes:
    head = Descriptor(keys, 1, 16, chunk_bytes, DeliveryMode.CHUNKWISE).to_bytes()
    return len(head).to_bytes(4, "big") + head + bytes(chunk_bytes * len(keys))


def usage(server: RunningServer, owner: str) -> Usage:
    with StorageClient(server.run_dir / "storage.sock") as storage:
        return storage.ask(GetUsage(owner=owner), Usage)


# --- stored ---------------------------------------------------------------------------------------


def test_parallel_puts_fill_a_quota_and_do_not_exceed_it(server: RunningServer) -> None:
    tenant, bucket = limited(server, stored_bytes=10 * 100 * KIB)

    def put(index: int) -> Answer:
        return tenant.call("PUT", f"/{bucket}/{index}", bytes(100 * KIB))

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(put, range(24)))
    assert all(is_exceeded(answer) for answer in answers if answer.status != 200)
    # A put that has just been committed may count twice for a moment, and keep another out.
    stored = [index for index, answer in enumerate(answers) if answer.status == 200]
    assert 3 <= len(stored) <= 10
    for index in range(10 - len(stored)):
        assert tenant.call("PUT", f"/{bucket}/late-{index}", bytes(100 * KIB)).status == 200
    (held,) = usage(server, tenant.name).buckets
    assert (held.object_count, held.stored_bytes) == (10, 10 * 100 * KIB)
    assert is_exceeded(tenant.call("PUT", f"/{bucket}/more", b"x"))
    assert tenant.call("GET", f"/{bucket}/{stored[0]}").status == 200
    assert tenant.call("PUT", f"/{bucket}/empty").status == 200
    assert tenant.call("DELETE", f"/{bucket}/{stored[0]}").status == 204
    assert tenant.call("PUT", f"/{bucket}/more", b"x").status == 200


def test_every_way_to_store_is_counted(server: RunningServer) -> None:
    tenant, bucket = limited(server, stored_bytes=100, object_count=3)
    assert tenant.call("PUT", f"/{bucket}/a", bytes(60)).status == 200
    copied = tenant.call("PUT", f"/{bucket}/b", headers={"x-amz-copy-source": f"/{bucket}/a"})
    assert is_exceeded(copied)
    assert is_exceeded(tenant.call("POST", f"/{bucket}?kv-put", put_body("c", "d", chunk_bytes=21)))
    assert (
        tenant.call("POST", f"/{bucket}?kv-put", put_body("c", "d", chunk_bytes=10)).status == 200
    )
    assert is_exceeded(tenant.call("PUT", f"/{bucket}/empty"))  # the fourth object


def test_parts_count_from_when_they_come_and_once(server: RunningServer) -> None:
    tenant, bucket = limited(server, stored_bytes=100)
    upload = tenant.call("POST", f"/{bucket}/big?uploads").xml.findtext("{*}UploadId")
    part = f"/{bucket}/big?partNumber=1&uploadId={upload}"
    assert is_exceeded(tenant.call("PUT", part, bytes(101)))
    assert tenant.call("PUT", part, bytes(90)).status == 200
    assert is_exceeded(tenant.call("PUT", f"/{bucket}/a", bytes(11)))
    etag = hashlib.md5(bytes(90), usedforsecurity=False).hexdigest()
    document = (
        "<CompleteMultipartUpload><Part><PartNumber>1</PartNumber>"
        f"<ETag>{etag}</ETag></Part></CompleteMultipartUpload>"
    )
    done = tenant.call("POST", f"/{bucket}/big?uploadId={upload}", document.encode())
    assert done.status == 200, done.body
    assert is_exceeded(tenant.call("PUT", f"/{bucket}/a", bytes(11)))
    assert tenant.call("PUT", f"/{bucket}/a", bytes(10)).status == 200


def test_accounts_and_open_parts_outlive_a_kill_of_the_storage_server(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with start_server(tmp_path_factory.mktemp("restart"), "storage.engine=files") as server:
        tenant, bucket = limited(server, stored_bytes=100)
        upload = tenant.call("POST", f"/{bucket}/big?uploads").xml.findtext("{*}UploadId")
        part = f"/{bucket}/big?partNumber=1&uploadId={upload}"
        assert tenant.call("PUT", part, bytes(90)).status == 200
        server.kill_storage()
        server.restart_storage()
        # The accounts were kept too, and the gateway found them again by itself.
        assert is_exceeded(tenant.call("PUT", f"/{bucket}/a", bytes(11)))
        assert tenant.call("DELETE", f"/{bucket}/big?uploadId={upload}").status == 204
        assert tenant.call("PUT", f"/{bucket}/a", bytes(100)).status == 200


def test_a_buckets_quota_holds_for_the_root_key_too(server: RunningServer) -> None:
    tenant = new_tenant(server, "owner")
    bucket = tenant.new_bucket()
    set_bucket_quota(server, bucket, Quota(stored_bytes=10))
    assert is_exceeded(call(server, "PUT", f"/{bucket}/a", bytes(11)))
    assert call(server, "PUT", f"/{bucket}/a", bytes(10)).status == 200


def test_a_client_that_waits_is_told_of_the_quota_before_it_sends(server: RunningServer) -> None:
    tenant, bucket = limited(server, stored_bytes=1000)
    for size_bytes, expected in ((1001, b"HTTP/1.1 403"), (1000, b"HTTP/1.1 100")):
        path = f"/{bucket}/key"
        named = signed_headers(
            server,
            "PUT",
            path,
            headers={"Expect": "100-continue", "Content-Length": str(size_bytes)},
            payload_hash="UNSIGNED-PAYLOAD",
            credentials=tenant.credentials,
        )
        with open_socket(server) as connection:
            send_head(connection, "PUT", path, named)
            assert connection.recv(12) == expected


def test_chunks_that_cannot_fit_are_refused_before_they_are_sent(server: RunningServer) -> None:
    tenant, bucket = limited(server, stored_bytes=1000)
    descriptor_bytes_max = Limits().descriptor_bytes_max
    path = f"/{bucket}?kv-put"
    for size_bytes, expected in (
        (4 + descriptor_bytes_max + 1001, b"HTTP/1.1 403"),
        (4 + descriptor_bytes_max + 1000, b"HTTP/1.1 100"),
    ):
        named = signed_headers(
            server,
            "POST",
            path,
            headers={"Expect": "100-continue", "Content-Length": str(size_bytes)},
            payload_hash="UNSIGNED-PAYLOAD",
            credentials=tenant.credentials,
        )
        with open_socket(server) as connection:
            send_head(connection, "POST", path, named)
            assert connection.recv(12) == expected


# --- requests and what is in flight ---------------------------------------------------------------


def test_requests_above_the_rate_are_told_when_to_come_back(server: RunningServer) -> None:
    tenant, bucket = limited(server, requests_per_s=0.01)
    answers = [tenant.call("GET", f"/{bucket}?location") for _ in range(3)]
    assert [answer.status for answer in answers] == [200, 503, 503]
    for refused in answers[1:]:
        assert refused.code == "SlowDown"
        assert 90 <= int(refused.headers["Retry-After"]) <= 100
    assert call(server, "GET", f"/{bucket}?location").status == 200  # the root key has no quota


def test_a_request_larger_than_what_may_be_in_flight_is_refused_for_good(
    server: RunningServer,
) -> None:
    tenant, bucket = limited(server, in_flight_bytes=1000)
    assert is_exceeded(tenant.call("PUT", f"/{bucket}/a", bytes(1001)))
    assert tenant.call("PUT", f"/{bucket}/a", bytes(1000)).status == 200


def test_puts_in_flight_leave_no_room_for_more_until_they_end(server: RunningServer) -> None:
    tenant, bucket = limited(server, in_flight_bytes=100_000)
    path = f"/{bucket}/slow"
    named = signed_headers(
        server,
        "PUT",
        path,
        headers={"Expect": "100-continue", "Content-Length": "80000"},
        payload_hash="UNSIGNED-PAYLOAD",
        credentials=tenant.credentials,
    )
    with open_socket(server) as connection:
        send_head(connection, "PUT", path, named)
        assert connection.recv(100).startswith(b"HTTP/1.1 100")  # it was let in
        connection.sendall(bytes(70_000))
        wait_until(lambda: bool(usage(server, tenant.name).tenants), "the put to begin")
        refused = tenant.call("PUT", f"/{bucket}/a", bytes(20_001))
        assert (refused.status, refused.code) == (503, "SlowDown")
        assert refused.headers["Retry-After"]
        (activity,) = usage(server, tenant.name).tenants
        assert (activity.identity, activity.in_flight_bytes) == (tenant.name, 80_000)
        assert tenant.call("PUT", f"/{bucket}/a", bytes(20_000)).status == 200
        connection.sendall(bytes(10_000))
        assert receive_answer(connection, "PUT").status == 200
    wait_until(lambda: usage(server, tenant.name).tenants == (), "the put to leave")
    assert tenant.call("PUT", f"/{bucket}/a", bytes(100_000)).status == 200


class OpenDelivery:
    """A kv-get whose body nobody reads, for the length of a `with` block."""

    def __init__(self, tenant: Tenant, bucket: str) -> None:
        body = chunk().to_bytes()
        path = f"/{bucket}?kv-get"
        named = signed_headers(
            tenant.server,
            "POST",
            path,
            body,
            {"Content-Length": str(len(body))},
            credentials=tenant.credentials,
        )
        self._connection = open_socket(tenant.server)
        send_head(self._connection, "POST", path, named)
        self._connection.sendall(body)
        assert self._connection.recv(12) == b"HTTP/1.1 200"

    def __enter__(self) -> OpenDelivery:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()


def chunk() -> Descriptor:
    return Descriptor(("chunk",), 1, 16, LARGE_BYTES, DeliveryMode.CHUNKWISE)


@pytest.fixture
def pair(server: RunningServer) -> tuple[Tenant, Tenant, str, str]:
    """Two users with a bucket each that holds one large chunk."""
    tenants = [new_tenant(server, name) for name in ("carol", "dave")]
    buckets = [tenant.new_bucket() for tenant in tenants]
    for tenant, bucket in zip(tenants, buckets, strict=True):
        assert tenant.call("PUT", f"/{bucket}/chunk", bytes(LARGE_BYTES)).status == 200
    return tenants[0], tenants[1], buckets[0], buckets[1]


def get_chunk(tenant: Tenant, bucket: str) -> Answer:
    return tenant.call("POST", f"/{bucket}?kv-get", chunk().to_bytes())


def test_a_quota_of_deliveries_holds_for_the_one_who_has_it(
    pair: tuple[Tenant, Tenant, str, str],
) -> None:
    carol, dave, hers, his = pair
    carol.change_user(quota=Quota(deliveries=1))
    with OpenDelivery(carol, hers):
        refused = get_chunk(carol, hers)
        assert (refused.status, refused.code) == (503, "SlowDown")
        assert refused.headers["Retry-After"]
        assert carol.call("HEAD", f"/{hers}/chunk").status == 200
        assert get_chunk(dave, his).status == 200


def test_the_schedules_shares_go_by_the_users_name(
    pair: tuple[Tenant, Tenant, str, str],
) -> None:
    carol, dave, hers, his = pair
    with StorageClient(carol.server.run_dir / "storage.sock") as storage:
        share = TenantShare(deliveries_max=1, cap_gbps=1.0)
        shares: dict[str, TenantShare | None] = {carol.name: share}
        storage.ask(SetSchedule(changes=ScheduleChanges(tenants=shares)), ScheduleState)
        with OpenDelivery(carol, hers):

            def is_hers_alone() -> bool:
                state = storage.ask(GetSchedule(), ScheduleState)
                return [one.tenant for one in state.deliveries] == [carol.name]

            wait_until(is_hers_alone, "deliveries of tests before to leave")
            refused = get_chunk(carol, hers)
            assert (refused.status, refused.code) == (503, "SlowDown")
            assert get_chunk(dave, his).status == 200
        shares = {carol.name: None}
        storage.ask(SetSchedule(changes=ScheduleChanges(tenants=shares)), ScheduleState)
