"""Objects that travel within a message: the same answers as of those that do not."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from objectcache_schemas.errors import InvalidRequest, NotFound, PreconditionFailed
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.messages.reads import CloseObject, ObjectOpened, OpenObject
from objectcache_schemas.messages.writes import CommitPut, PutObject, SendData, Stored
from objectcache_schemas.operators.schedule import ScheduleChanges, ScheduleState, SetSchedule
from objectcache_schemas.operators.server_state import GetHealth, Health
from objectcache_schemas.operators.traces import GetTraces, Traces
from objectcache_schemas.records import Condition, ObjectAttributes
from tests.integration.served import wait_until
from tests.s3_clients import call, s3_client
from tests.servers import RunningServer, start_server
from tests.storage_client import StorageClient

LIMIT_BYTES = 64 << 10  # above it an object is opened, and sent as a body
SIZES_BYTES = [1, 4096, LIMIT_BYTES, LIMIT_BYTES + 1]


@pytest.fixture
def storage(server: RunningServer) -> Any:
    with StorageClient(server.run_dir / "storage.sock") as client:
        yield client


def status_of(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


@pytest.mark.parametrize("size_bytes", SIZES_BYTES)
def test_ranges_conditions_and_checksums_are_the_same_at_every_size(
    s3: Any, bucket: str, size_bytes: int
) -> None:
    data = os.urandom(size_bytes)
    put = s3.put_object(Bucket=bucket, Key="k", Body=data, ContentType="a/b", Metadata={"m": "1"})
    assert put["ETag"] == f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
    found = s3.get_object(Bucket=bucket, Key="k", ChecksumMode="ENABLED")
    assert found["Body"].read() == data
    assert found["ContentType"] == "a/b"
    assert found["Metadata"] == {"m": "1"}
    assert found["ChecksumCRC32"] == put["ChecksumCRC32"]
    for text, part in (("bytes=0-0", data[:1]), ("bytes=-1", data[-1:]), ("bytes=0-", data)):
        ranged = s3.get_object(Bucket=bucket, Key="k", Range=text)
        assert ranged["ResponseMetadata"]["HTTPStatusCode"] == 206
        assert ranged["Body"].read() == part
        assert ranged["ContentRange"].endswith(f"/{size_bytes}")
        assert "ChecksumCRC32" not in ranged
    for status, conditions in (
        (304, {"IfNoneMatch": put["ETag"]}),
        (412, {"IfMatch": '"other"'}),
        (416, {"Range": f"bytes={size_bytes}-"}),
    ):
        with pytest.raises(ClientError) as caught:
            s3.get_object(Bucket=bucket, Key="k", **conditions)
        assert status_of(caught.value) == status
    assert s3.get_object(Bucket=bucket, Key="k", PartNumber=1)["Body"].read() == data


def test_an_empty_object_is_answered_and_has_no_range(server: RunningServer, bucket: str) -> None:
    assert call(server, "PUT", f"/{bucket}/k", b"").status == 200
    answer = call(server, "GET", f"/{bucket}/k")
    assert (answer.status, answer.body, answer.headers["content-length"]) == (200, b"", "0")
    refused = call(server, "GET", f"/{bucket}/k", headers={"range": "bytes=0-0"})
    assert refused.status == 416
    assert refused.headers["content-range"] == "bytes */0"


def test_many_small_requests_on_one_connection_answer_in_turn(s3: Any, bucket: str) -> None:
    for number in range(20):
        s3.put_object(Bucket=bucket, Key=f"k{number}", Body=str(number).encode() * number)

    def body_of(number: int) -> bytes:
        return bytes(s3.get_object(Bucket=bucket, Key=f"k{number}")["Body"].read())

    with ThreadPoolExecutor(8) as threads:
        bodies = threads.map(body_of, range(20))
        assert list(bodies) == [str(number).encode() * number for number in range(20)]


def test_of_many_small_puts_at_once_one_is_first(s3: Any, bucket: str) -> None:
    def put(number: int) -> int:
        try:
            s3.put_object(Bucket=bucket, Key="k", Body=b"%d" % number, IfNoneMatch="*")
        except ClientError as error:
            return status_of(error)
        return 200

    with ThreadPoolExecutor(8) as threads:
        statuses = list(threads.map(put, range(16)))
    assert sorted(statuses) == [200, *[412] * 15]


def test_a_small_body_that_is_not_what_was_signed_is_not_stored(
    server: RunningServer, bucket: str
) -> None:
    wrong = {"content-md5": "1B2M2Y8AsgTpgAmY7PhCfg=="}  # of nothing
    assert call(server, "PUT", f"/{bucket}/k", b"data", headers=wrong).status == 400
    assert call(server, "GET", f"/{bucket}/k").status == 404
    assert call(server, "PUT", "/no-such-bucket-here/k", b"data").status == 404


# --- the storage server's side -------------------------------------------------------------------


COMMIT = CommitPut(etag="etag", attributes=ObjectAttributes(content_type="a/b"))


def whole(
    bucket: str,
    data: bytes,
    *,
    size_bytes: int | None = None,
    condition: Condition = Condition(),  # noqa: B008 - it is frozen
    commit: CommitPut | None = COMMIT,
) -> PutObject:
    """A put of one message."""
    return PutObject(
        bucket=bucket,
        key="k",
        size_bytes=len(data) if size_bytes is None else size_bytes,
        condition=condition,
        data=data,
        commit=commit,
    )


def test_a_put_of_one_message_is_stored_as_it_says(storage: StorageClient, bucket: str) -> None:
    info = storage.ask(whole(bucket, b"data"), Stored).info
    assert (info.size_bytes, info.etag, info.attributes.content_type) == (4, "etag", "a/b")
    opened = storage.ask(OpenObject(bucket=bucket, key="k", body_bytes_max=4), ObjectOpened)
    assert opened.body == b"data"
    with pytest.raises(PreconditionFailed):
        storage.ask(whole(bucket, b"other", condition=Condition(absent=True)), Stored)
    with pytest.raises(InvalidRequest, match="size_bytes is 5"):
        storage.ask(whole(bucket, b"data", size_bytes=5), Stored)
    with pytest.raises(NotFound):
        storage.ask(whole("no-such-bucket", b"data"), Stored)
    assert storage.ask(GetHealth(), Health).draining is False


def test_data_without_a_commit_is_a_put_like_any_other(storage: StorageClient, bucket: str) -> None:
    storage.ask(whole(bucket, b"data", commit=None), SendData)


def test_an_object_comes_whole_only_to_who_asks_for_it(storage: StorageClient, bucket: str) -> None:
    storage.ask(whole(bucket, b"data"), Stored)
    for body_bytes_max in (0, 3):
        request = OpenObject(bucket=bucket, key="k", body_bytes_max=body_bytes_max)
        assert storage.ask(request, ObjectOpened).body is None
        storage.ask(CloseObject(), Done)
    wait_until(
        lambda: storage.ask(GetHealth(), Health).deliveries_in_flight == 0, "all deliveries to end"
    )


def has_ended(found: Traces) -> bool:
    return all(trace.duration_s is not None for trace in found.traces)


def test_a_small_object_is_traced_as_a_delivery(
    server: RunningServer, storage: StorageClient, bucket: str
) -> None:
    assert call(server, "PUT", f"/{bucket}/k", b"data").status == 200
    answer = call(server, "GET", f"/{bucket}/k")
    request_id = answer.headers["x-amz-request-id"]
    asked = GetTraces(request_id=request_id)
    wait_until(lambda: has_ended(storage.ask(asked, Traces)), "the end of the delivery")
    (trace,) = storage.ask(asked, Traces).traces
    assert (trace.payload_bytes, trace.chunk_count, trace.path) == (4, 1, "s3tcp")
    assert trace.duration_s is not None
    assert trace.error is None
    assert sum(phase.seconds for phase in trace.phases if phase.name != "client") == pytest.approx(
        trace.duration_s
    )


def test_under_a_cap_small_objects_are_paced_with_all_others(tmp_path: Path) -> None:
    with start_server(tmp_path / "data") as server:
        s3 = s3_client(server)
        s3.create_bucket(Bucket="capped")
        s3.put_object(Bucket="capped", Key="k", Body=b"data")
        request = OpenObject(bucket="capped", key="k", identity="root", body_bytes_max=LIMIT_BYTES)
        with StorageClient(server.run_dir / "storage.sock") as storage:
            assert storage.ask(request, ObjectOpened).body == b"data"
            storage.ask(SetSchedule(changes=ScheduleChanges(cap_gbps=1.0)), ScheduleState)
            assert storage.ask(request, ObjectOpened).body is None
            storage.ask(CloseObject(), Done)
        assert s3.get_object(Bucket="capped", Key="k")["Body"].read() == b"data"
