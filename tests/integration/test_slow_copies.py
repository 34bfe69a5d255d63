"""Copies and completions that take long: the connection lives, and the body tells the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from botocore.exceptions import ClientError

from objectcache_gateway.answering.slow_answers import copy_timeout_s
from objectcache_runtime.settings import GatewaySettings
from tests.integration.served import wait_until
from tests.s3_clients import Answer, call, s3_client
from tests.servers import RunningServer, start_server

MIB = 1 << 20
SIZE_BYTES = 32 * MIB
# It is over before the loop's next turn, so that no copy is done in time however late that turn is.
SLOW_AFTER_S = 1e-6
BEGINNING = b'<?xml version="1.0" encoding="UTF-8"?>\n '
SOURCE = {"Bucket": "bbb", "Key": "source"}


@pytest.fixture(params=[SLOW_AFTER_S, 60.0], ids=["slow", "in-time"], scope="module")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    data_dir = tmp_path_factory.mktemp("copies") / "data"
    after = f"gateway.slow_answer_after_s={request.param}"
    with start_server(data_dir, "storage.engine=memory", after) as running:
        s3: Any = s3_client(running)
        s3.create_bucket(Bucket="bbb")
        s3.put_object(Bucket="bbb", Key="source", Body=bytes(SIZE_BYTES))
        s3.put_object(Bucket="bbb", Key="taken", Body=b"kept")
        yield running


@pytest.fixture
def is_slow(request: pytest.FixtureRequest) -> bool:
    return "slow" in request.node.callspec.id


def copy(server: RunningServer, key: str, headers: dict[str, str]) -> Answer:
    named = {"x-amz-copy-source": "/bbb/source", **headers}
    return call(server, "PUT", f"/bbb/{key}", headers=named)


def test_a_slow_copy_is_answered_with_white_space_and_then_its_result(
    server: RunningServer, is_slow: bool
) -> None:
    answer = copy(server, "copied", {})
    assert answer.status == 200
    assert answer.body.startswith(BEGINNING) == is_slow
    assert (answer.headers["Content-Length"] is None) == is_slow
    assert answer.xml.tag.endswith("CopyObjectResult")
    assert answer.body.count(b"<?xml") == 1
    s3: Any = s3_client(server)
    copied = s3.copy_object(Bucket="bbb", Key="copied", CopySource=SOURCE)
    head = s3.head_object(Bucket="bbb", Key="copied")
    assert (head["ETag"], head["ContentLength"]) == (copied["CopyObjectResult"]["ETag"], SIZE_BYTES)


def test_a_slow_copy_that_fails_says_so_in_the_body_and_boto3_raises_it(
    server: RunningServer, is_slow: bool
) -> None:
    answer = copy(server, "taken", {"If-None-Match": "*"})
    assert answer.status == (200 if is_slow else 412)
    assert answer.body.startswith(BEGINNING) == is_slow
    assert (answer.xml.tag, answer.code) == ("Error", "PreconditionFailed")
    assert answer.xml.findtext("RequestId") == answer.headers["x-amz-request-id"]
    assert answer.xml.findtext("Resource") == "/bbb/taken"
    s3: Any = s3_client(server)
    with pytest.raises(ClientError) as caught:
        s3.copy_object(Bucket="bbb", Key="taken", CopySource=SOURCE, IfNoneMatch="*")
    assert caught.value.response.get("Error", {}).get("Code") == "PreconditionFailed"
    assert s3.get_object(Bucket="bbb", Key="taken")["Body"].read() == b"kept"


def test_an_error_that_comes_before_any_byte_moves_keeps_its_status(server: RunningServer) -> None:
    answer = call(server, "PUT", "/bbb/k", headers={"x-amz-copy-source": "/bbb/absent"})
    assert (answer.status, answer.code) == (404, "NoSuchKey")


def test_parts_are_copied_and_joined_slowly_as_boto3_expects_it(
    server: RunningServer, is_slow: bool
) -> None:
    s3: Any = s3_client(server)
    upload = s3.create_multipart_upload(Bucket="bbb", Key="joined")
    named = {"Bucket": "bbb", "Key": "joined", "UploadId": upload["UploadId"]}
    part = s3.upload_part_copy(**named, PartNumber=1, CopySource=SOURCE)["CopyPartResult"]
    parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    completed = s3.complete_multipart_upload(**named, MultipartUpload=parts)
    assert completed["ETag"].endswith('-1"')
    assert completed["Key"] == "joined"
    length = completed["ResponseMetadata"]["HTTPHeaders"].get("content-length")
    assert (length is None) == is_slow
    assert s3.head_object(Bucket="bbb", Key="joined")["ETag"] == completed["ETag"]


def test_a_slow_completion_that_fails_is_raised_by_boto3(server: RunningServer) -> None:
    s3: Any = s3_client(server)
    upload = s3.create_multipart_upload(Bucket="bbb", Key="taken")
    named = {"Bucket": "bbb", "Key": "taken", "UploadId": upload["UploadId"]}
    part = s3.upload_part_copy(**named, PartNumber=1, CopySource=SOURCE)["CopyPartResult"]
    parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
    with pytest.raises(ClientError) as caught:
        s3.complete_multipart_upload(**named, MultipartUpload=parts, IfNoneMatch="*")
    assert caught.value.response.get("Error", {}).get("Code") == "PreconditionFailed"
    s3.abort_multipart_upload(**named)


def test_the_log_names_the_error_of_an_answer_that_had_begun(server: RunningServer) -> None:
    request_id = copy(server, "taken", {"If-None-Match": "*"}).headers["x-amz-request-id"]
    log = server.data_dir / "gateway.log"

    def is_named() -> bool:
        lines = log.read_text().splitlines()
        return any(request_id in line and "PreconditionFailed" in line for line in lines)

    wait_until(is_named, "the request's line in the log")


def test_the_gateway_waits_longer_for_a_copy_of_more_bytes() -> None:
    gateway = GatewaySettings(storage_timeout_s=60.0)
    assert copy_timeout_s(gateway, 0) == 60.0
    assert copy_timeout_s(gateway, 800 * MIB) == 160.0
