"""Ways around quotas that are none, over HTTP and on the storage server's socket."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest

from objectcache_schemas.errors import NotFound
from objectcache_schemas.messages.buckets import DeleteBucket
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.messages.uploads import AbortUpload
from objectcache_schemas.messages.writes import CommitPut, PutPart, SendData, Stored
from objectcache_schemas.records import Quota
from tests.integration.tenants import Tenant, new_tenant, set_bucket_quota
from tests.s3_clients import Answer, call
from tests.servers import RunningServer, start_server
from tests.storage_client import StorageClient


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server where users may own few buckets."""
    with start_server(
        tmp_path_factory.mktemp("bypasses"),
        "storage.engine=memory",
        "storage.buckets_per_user_max=3",
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


def open_upload(tenant: Tenant, path: str) -> str:
    upload_id = tenant.call("POST", f"{path}?uploads").xml.findtext("{*}UploadId")
    assert upload_id
    return upload_id


def complete(tenant: Tenant, path: str, upload_id: str, *parts: bytes) -> Answer:
    listed = "".join(
        f"<Part><PartNumber>{number}</PartNumber><ETag>{etag_of(data)}</ETag></Part>"
        for number, data in enumerate(parts, 1)
    )
    document = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>"
    return tenant.call("POST", f"{path}?uploadId={upload_id}", document.encode())


def etag_of(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def copy(tenant: Tenant, path: str, source: str, **headers: str) -> Answer:
    return tenant.call("PUT", path, headers={"x-amz-copy-source": source, **headers})


# --- parts that come too late ---------------------------------------------------------------------


@pytest.mark.parametrize("end", ["abort", "delete"])
def test_a_part_that_ends_after_its_upload_is_not_kept_and_does_not_count(
    server: RunningServer, end: str
) -> None:
    tenant, bucket = limited(server, stored_bytes=100, object_count=2)
    upload_id = open_upload(tenant, f"/{bucket}/big")
    put = PutPart(
        bucket=bucket, key="big", upload_id=upload_id, part_number=1, size_bytes=90, identity="x"
    )
    with (
        StorageClient(server.run_dir / "storage.sock") as slow,
        StorageClient(server.run_dir / "storage.sock") as other,
    ):
        slow.ask(put, SendData)
        if end == "abort":
            other.ask(AbortUpload(bucket=bucket, key="big", upload_id=upload_id), Done)
        else:
            other.ask(DeleteBucket(name=bucket), Done)
            assert tenant.call("PUT", f"/{bucket}").status == 200
        slow.send_data([bytes(90)])
        with pytest.raises(NotFound) as caught:
            slow.ask(CommitPut(etag=etag_of(bytes(90))), Stored)
        assert caught.value.code == "NoSuchUpload"
    assert tenant.call("PUT", f"/{bucket}/a", bytes(100)).status == 200
    assert tenant.call("PUT", f"/{bucket}/b").status == 200


# --- what counts ----------------------------------------------------------------------------------


def test_open_uploads_are_objects(server: RunningServer) -> None:
    tenant, bucket = limited(server, object_count=2)
    first = open_upload(tenant, f"/{bucket}/a")
    open_upload(tenant, f"/{bucket}/b")
    assert is_exceeded(tenant.call("POST", f"/{bucket}/c?uploads"))
    assert is_exceeded(tenant.call("PUT", f"/{bucket}/c"))
    assert tenant.call("DELETE", f"/{bucket}/a?uploadId={first}").status == 204
    assert tenant.call("PUT", f"/{bucket}/c").status == 200


def test_a_completion_is_repeated_when_the_quota_is_full(server: RunningServer) -> None:
    tenant, bucket = limited(server, object_count=1, stored_bytes=10)
    upload_id = open_upload(tenant, f"/{bucket}/a")
    part = f"/{bucket}/a?partNumber=1&uploadId={upload_id}"
    assert tenant.call("PUT", part, bytes(10)).status == 200
    first = complete(tenant, f"/{bucket}/a", upload_id, bytes(10))
    again = complete(tenant, f"/{bucket}/a", upload_id, bytes(10))
    assert (first.status, again.status) == (200, 200), again.body
    assert first.xml.findtext("{*}ETag") == again.xml.findtext("{*}ETag")
    tenant.change_user(quota=Quota(object_count=0))
    assert complete(tenant, f"/{bucket}/a", upload_id, bytes(10)).status == 200
    assert is_exceeded(tenant.call("PUT", f"/{bucket}/b"))


def test_a_quota_lowered_since_the_parts_came_holds_for_the_completion(
    server: RunningServer,
) -> None:
    tenant, bucket = limited(server, stored_bytes=10)
    upload_id = open_upload(tenant, f"/{bucket}/a")
    part = f"/{bucket}/a?partNumber=1&uploadId={upload_id}"
    assert tenant.call("PUT", part, bytes(10)).status == 200
    tenant.change_user(quota=Quota(stored_bytes=9))
    assert is_exceeded(complete(tenant, f"/{bucket}/a", upload_id, bytes(10)))
    tenant.change_user(quota=Quota(stored_bytes=10))
    assert complete(tenant, f"/{bucket}/a", upload_id, bytes(10)).status == 200


def test_a_user_owns_so_many_buckets_and_the_root_user_any_number(server: RunningServer) -> None:
    tenant = new_tenant(server)
    buckets = [tenant.new_bucket() for _ in range(3)]
    refused = tenant.call("PUT", f"/{tenant.name}-more")
    assert (refused.status, refused.code) == (400, "TooManyBuckets")
    assert b"storage.buckets_per_user_max" in refused.body
    assert tenant.call("PUT", f"/{buckets[0]}").status == 200  # its own, again
    assert tenant.call("DELETE", f"/{buckets[0]}").status == 204
    assert tenant.call("PUT", f"/{tenant.name}-more").status == 200
    for index in range(4):
        assert call(server, "PUT", f"/roots-{index}").status == 200


# --- copies ---------------------------------------------------------------------------------------


def test_copies_are_in_flight_as_puts_are(server: RunningServer) -> None:
    tenant, bucket = limited(server)
    assert tenant.call("PUT", f"/{bucket}/a", bytes(2000)).status == 200
    upload_id = open_upload(tenant, f"/{bucket}/big")
    tenant.change_user(quota=Quota(in_flight_bytes=1000))
    part = f"/{bucket}/big?partNumber=1&uploadId={upload_id}"
    assert is_exceeded(copy(tenant, f"/{bucket}/b", f"/{bucket}/a"))
    assert is_exceeded(copy(tenant, part, f"/{bucket}/a"))
    in_part = copy(tenant, part, f"/{bucket}/a", **{"x-amz-copy-source-range": "bytes=0-999"})
    assert in_part.status == 200
    # The engine joins by copying; what its parts were let in for is not refused for its size.
    tenant.change_user(quota=Quota(in_flight_bytes=500))
    assert complete(tenant, f"/{bucket}/big", upload_id, bytes(1000)).status == 200


# --- operators' quotas and requests ---------------------------------------------------------------


def test_a_bucket_with_a_quota_is_deleted_by_operators_only(server: RunningServer) -> None:
    tenant = new_tenant(server)
    bucket, other = tenant.new_bucket(), tenant.new_bucket()
    set_bucket_quota(server, bucket, Quota(stored_bytes=10))
    refused = tenant.call("DELETE", f"/{bucket}")
    assert (refused.status, refused.code) == (403, "AccessDenied")
    assert is_exceeded(tenant.call("PUT", f"/{bucket}/a", bytes(11)))
    assert tenant.call("DELETE", f"/{other}").status == 204
    assert call(server, "DELETE", f"/{bucket}").status == 204


def test_denied_requests_are_spent_from_who_asks_and_not_from_the_bucket(
    server: RunningServer,
) -> None:
    owner = new_tenant(server)
    bucket = owner.new_bucket()
    set_bucket_quota(server, bucket, Quota(requests_per_s=0.01))
    stranger = new_tenant(server, "stranger")
    assert stranger.call("GET", f"/{bucket}/a").status == 403
    stranger.change_user(quota=Quota(requests_per_s=0.01))
    answers = [stranger.call("GET", f"/{bucket}/a") for _ in range(3)]
    assert [answer.status for answer in answers] == [403, 503, 503]
    assert answers[1].code == "SlowDown"
    assert owner.call("GET", f"/{bucket}?location").status == 200
    assert owner.call("GET", f"/{bucket}?location").status == 503
