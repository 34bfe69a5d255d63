"""S3 over RDMA against a server that serves none of it: right data or a right refusal, never
silence. The client here and its judges are in `tests/cuobject_client.py`.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cuobject_client import (
    JUDGES,
    REPLY,
    TOKEN,
    TRANSFERRED,
    UNSIGNED,
    CuObjectClient,
    Verdict,
    cuobject_token,
    draft_flaws,
    hipobject_token,
)
from tests.integration.served import wait_until
from tests.processes_http import ask
from tests.s3_clients import (
    Answer,
    call,
    open_socket,
    presigned_path,
    receive_answer,
    send,
    send_head,
    signed_headers,
)
from tests.servers import RunningServer, start_server

ADDRESS = 0x7F00DEADB000
BUFFER_BYTES = 4 << 20
CUOBJECT = cuobject_token(ADDRESS, BUFFER_BYTES)
TOKENS = [
    CUOBJECT,
    cuobject_token(ADDRESS, BUFFER_BYTES, gid=None, lid=9),
    f"{CUOBJECT}:{ADDRESS:016x}:{BUFFER_BYTES:016x}",
    hipobject_token(0, ADDRESS, BUFFER_BYTES),
    hipobject_token(1, ADDRESS, BUFFER_BYTES),
]
KINDS = ["cuobject", "infiniband", "appended", "hipobject-dc", "hipobject-rc"]
SIZES_BYTES = [0, 1, 4096, 70_000, 3 << 20]  # 70,000 are handed over, 4,096 are not
AUDIT_LOG = "audit.log"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that logs all that it ever would."""
    directory = tmp_path_factory.mktemp("rdma")
    with start_server(
        directory / "data",
        f"gateway.audit_log={directory / AUDIT_LOG}",
        "gateway.log_level=debug",
        "storage.log_level=debug",
    ) as running:
        yield running


@pytest.fixture
def rdma(server: RunningServer) -> CuObjectClient:
    return CuObjectClient(server, CUOBJECT)


def is_stored(server: RunningServer, path: str) -> bool:
    return call(server, "HEAD", path).status == 200


def assert_declined(method: str, answer: Answer) -> None:
    assert [judge(method, answer) for judge in JUDGES] == [Verdict.DECLINED] * len(JUDGES)
    assert draft_flaws(method, answer) == []


def assert_failed(answer: Answer, status: int, code: str) -> None:
    """An error that no client takes for a transfer."""
    assert (answer.status, answer.code) == (status, code)
    assert REPLY not in answer.headers
    assert "ETag" not in answer.headers


def declines(server: RunningServer) -> dict[str, float]:
    status, page = ask(server.run_dir / "gateway-0.sock", "GET", "/metrics")
    assert status == 200
    return {
        sample.labels["operation"]: sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
        if sample.name == "objectcache_rdma_declines_total"
    }


# --- whole clients -------------------------------------------------------------------------------


@pytest.mark.parametrize("token", TOKENS, ids=KINDS)
def test_what_a_client_of_rdma_stores_is_what_it_reads(
    server: RunningServer, bucket: str, token: str
) -> None:
    client = CuObjectClient(server, token)
    for size_bytes in SIZES_BYTES:
        data, path = secrets.token_bytes(size_bytes), f"/{bucket}/{size_bytes}"
        client.put(path, data)
        assert client.get(path) == data


def test_ranges_and_parts_come_in_the_body_with_their_status(
    rdma: CuObjectClient, bucket: str
) -> None:
    data = secrets.token_bytes(200_000)
    rdma.put(f"/{bucket}/k", data)
    for first, last in ((0, 9), (5, 150_004), (0, 199_999)):
        answer = rdma.ask("GET", f"/{bucket}/k", {"Range": f"bytes={first}-{last}"})
        assert_declined("GET", answer)
        assert (answer.status, answer.body) == (206, data[first : last + 1])
        assert answer.headers["Content-Range"] == f"bytes {first}-{last}/200000"
    part = rdma.ask("GET", f"/{bucket}/k?partNumber=1")
    assert (part.status, part.headers[REPLY], part.body) == (206, "501", data)


# --- writes --------------------------------------------------------------------------------------


def test_a_declined_write_is_a_200_without_an_etag_and_stores_nothing(
    server: RunningServer, rdma: CuObjectClient, bucket: str
) -> None:
    for checksum in ({}, {"x-amz-checksum-crc64nvme": "h5KVR3rdbcc="}):
        answer = rdma.ask("PUT", f"/{bucket}/k", checksum)
        assert_declined("PUT", answer)
        assert (answer.status, answer.headers[REPLY]) == (200, "501")
        assert answer.headers["Content-Type"] == "application/xml"
        assert answer.xml.tag == "Error"
        assert answer.code == "RDMANotSupported"
        assert "ETag" not in answer.headers
        assert TRANSFERRED not in answer.headers
        assert not is_stored(server, f"/{bucket}/k")


def test_a_declined_write_leaves_what_is_stored(rdma: CuObjectClient, bucket: str) -> None:
    etag = rdma.put(f"/{bucket}/k", b"first")
    assert_declined("PUT", rdma.ask("PUT", f"/{bucket}/k"))
    kept = rdma.ask("GET", f"/{bucket}/k")
    assert (kept.headers["ETag"], kept.body) == (etag, b"first")


def test_a_part_is_declined_by_itself_and_then_comes_in_a_body(
    rdma: CuObjectClient, s3: Any, bucket: str
) -> None:
    upload = s3.create_multipart_upload(Bucket=bucket, Key="k")["UploadId"]
    path = f"/{bucket}/k?partNumber=1&uploadId={upload}"
    answer = rdma.ask("PUT", path)
    assert_declined("PUT", answer)
    assert answer.code == "RDMANotSupported"
    assert "Parts" not in s3.list_parts(Bucket=bucket, Key="k", UploadId=upload)
    etag = rdma.put(path, b"all of it")
    s3.complete_multipart_upload(
        Bucket=bucket,
        Key="k",
        UploadId=upload,
        MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": etag}]},
    )
    assert rdma.get(f"/{bucket}/k") == b"all of it"


@pytest.mark.parametrize(
    ("body", "headers", "code"),
    [
        (b"the bytes themselves", {}, "InvalidRequest"),
        (b"", {"Content-MD5": "1B2M2Y8AsgTpgAmY7PhCfg=="}, "InvalidRequest"),
        (b"", {"x-amz-content-sha256": "0" * 64}, "InvalidRequest"),
        (b"", {TOKEN: "not a token"}, "InvalidRDMAToken"),
        (b"", {TOKEN: cuobject_token(ADDRESS, 0)}, "InvalidRDMAToken"),
        (b"", {TOKEN: f"{CUOBJECT},{CUOBJECT}"}, "InvalidRDMAToken"),
    ],
)
def test_a_write_that_breaks_the_drafts_rules_is_refused_and_stores_nothing(
    server: RunningServer,
    rdma: CuObjectClient,
    bucket: str,
    body: bytes,
    headers: dict[str, str],
    code: str,
) -> None:
    assert_failed(rdma.ask("PUT", f"/{bucket}/k", headers, body), 400, code)
    assert not is_stored(server, f"/{bucket}/k")


def test_a_write_in_chunks_of_unknown_length_is_no_empty_one(
    server: RunningServer, bucket: str
) -> None:
    path = f"/{bucket}/k"
    signed = signed_headers(server, "PUT", path, headers={TOKEN: CUOBJECT}, payload_hash=UNSIGNED)
    with open_socket(server) as connection:
        send_head(connection, "PUT", path, {**signed, "Transfer-Encoding": "chunked"})
        connection.sendall(b"0\r\n\r\n")
        assert_failed(receive_answer(connection), 400, "InvalidRequest")
    assert not is_stored(server, path)


# --- reads ---------------------------------------------------------------------------------------


def test_a_read_that_fails_fails_as_without_a_token(rdma: CuObjectClient, bucket: str) -> None:
    rdma.put(f"/{bucket}/k", b"0123456789")
    assert_failed(rdma.ask("GET", f"/{bucket}/absent"), 404, "NoSuchKey")
    past = {"Range": "bytes=10-20"}
    assert_failed(rdma.ask("GET", f"/{bucket}/k", past), 416, "InvalidRange")
    assert_failed(rdma.ask("GET", f"/{bucket}/k", {TOKEN: "00"}), 400, "InvalidRDMAToken")
    assert_failed(rdma.ask("GET", f"/{bucket}/k", {TOKEN: ""}), 400, "InvalidRDMAToken")
    nowhere = "/no-such-bucket/k"
    assert_failed(rdma.ask("PUT", nowhere), 404, "NoSuchBucket")


def test_a_head_says_what_a_read_would_without_reading(rdma: CuObjectClient, bucket: str) -> None:
    rdma.put(f"/{bucket}/k", b"0123456789")
    answer = rdma.ask("HEAD", f"/{bucket}/k")
    assert (answer.status, answer.headers["Content-Length"], answer.body) == (200, "10", b"")
    assert answer.headers[REPLY] == "501"
    assert rdma.ask("HEAD", f"/{bucket}/k", {TOKEN: "00"}).status == 400


def test_a_client_that_takes_any_reply_for_a_transfer_gets_none(
    rdma: CuObjectClient, bucket: str
) -> None:
    rdma.put(f"/{bucket}/k", b"0123456789")
    cpp = {"User-Agent": "aws-sdk-cpp/1.11.760 ua/2.1", "x-amz-api-version": "2006-03-01"}
    answer = rdma.ask("GET", f"/{bucket}/k", cpp)
    assert REPLY not in answer.headers
    assert (answer.status, answer.body) == (200, b"0123456789")
    assert draft_flaws("GET", answer) == []


# --- who asked -----------------------------------------------------------------------------------


def test_a_token_that_the_signature_does_not_cover_is_denied(
    server: RunningServer, bucket: str
) -> None:
    path = f"/{bucket}/k"
    for method in ("GET", "HEAD", "PUT"):
        signed = signed_headers(server, method, path, payload_hash=UNSIGNED)
        answer = send(server, method, path, headers={**signed, TOKEN: CUOBJECT})
        assert answer.status == 403
        assert REPLY not in answer.headers
    signed = signed_headers(server, "GET", path, headers={TOKEN: CUOBJECT}, payload_hash=UNSIGNED)
    other = {**signed, TOKEN: cuobject_token(ADDRESS + 4096, BUFFER_BYTES)}
    assert_failed(send(server, "GET", path, headers=other), 403, "SignatureDoesNotMatch")
    assert not is_stored(server, path)


def test_a_presigned_request_has_its_token_among_the_signed_headers_or_none(
    server: RunningServer, rdma: CuObjectClient, s3: Any, bucket: str
) -> None:
    rdma.put(f"/{bucket}/k", b"0123456789")
    plain = presigned_path(s3, "get_object", {"Bucket": bucket, "Key": "k"})
    assert_failed(send(server, "GET", plain, headers={TOKEN: CUOBJECT}), 403, "AccessDenied")

    def add_token(request: Any, **_: Any) -> None:
        request.headers[TOKEN] = CUOBJECT

    s3.meta.events.register("before-sign.s3", add_token)
    signed = presigned_path(s3, "get_object", {"Bucket": bucket, "Key": "k"})
    assert TOKEN in signed
    answer = send(server, "GET", signed, headers={TOKEN: CUOBJECT})
    assert_declined("GET", answer)
    assert answer.body == b"0123456789"
    write = presigned_path(s3, "put_object", {"Bucket": bucket, "Key": "w"})
    declined = send(server, "PUT", write, headers={TOKEN: CUOBJECT})
    assert_declined("PUT", declined)
    assert not is_stored(server, f"/{bucket}/w")


# --- dialects ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x-rdma-info", "x-scal-rdma", "x-amz-meta-rdma-token"])
def test_a_dialect_is_refused_before_it_stores_an_object_of_no_bytes(
    server: RunningServer, rdma: CuObjectClient, bucket: str, name: str
) -> None:
    rdma.put(f"/{bucket}/there", b"0123456789")
    for method, key in (("PUT", "k"), ("GET", "there")):
        answer = call(server, method, f"/{bucket}/{key}", headers={name: CUOBJECT})
        assert_failed(answer, 501, "RDMANotSupported")
        assert name in (answer.xml.findtext("Message") or "")
    assert not is_stored(server, f"/{bucket}/k")
    assert call(server, "HEAD", f"/{bucket}/there", headers={name: CUOBJECT}).status == 200


def test_a_protocol_without_a_token_stores_nothing_and_reads_what_is_stored(
    server: RunningServer, rdma: CuObjectClient, bucket: str
) -> None:
    rdma.put(f"/{bucket}/there", b"0123456789")
    second = {"x-amz-rdma-protocol": "hipobj-rc-v2"}
    refused = call(server, "PUT", f"/{bucket}/k", headers=second)
    assert_failed(refused, 501, "RDMANotSupported")
    assert not is_stored(server, f"/{bucket}/k")
    assert call(server, "GET", f"/{bucket}/there", headers=second).body == b"0123456789"
    control = call(server, "POST", "/.hipobj-rc/prepare", headers=second)
    assert_failed(control, 400, "InvalidBucketName")


def test_without_any_of_it_an_object_of_no_bytes_is_one(server: RunningServer, bucket: str) -> None:
    answer = call(server, "PUT", f"/{bucket}/k", headers={"x-amz-meta-rdma": "tokens are near"})
    assert (answer.status, REPLY in answer.headers) == (200, False)
    assert call(server, "HEAD", f"/{bucket}/k").headers["Content-Length"] == "0"


# --- what is known of it afterwards --------------------------------------------------------------


def test_declines_are_counted_by_operation_and_refusals_are_not(
    server: RunningServer, rdma: CuObjectClient, bucket: str
) -> None:
    rdma.put(f"/{bucket}/k", b"0123456789")
    before = declines(server)
    rdma.ask("GET", f"/{bucket}/k")
    rdma.ask("GET", f"/{bucket}/k", {TOKEN: "00"})
    rdma.ask("PUT", f"/{bucket}/k")
    rdma.ask("PUT", f"/{bucket}/k")
    after = declines(server)
    assert after["GetObject"] - before.get("GetObject", 0) == 1
    assert after["PutObject"] - before["PutObject"] == 2


def test_no_log_shows_what_a_token_opens(server: RunningServer, bucket: str) -> None:
    address, key = secrets.randbits(60) | 1 << 59, secrets.randbits(31) | 1 << 31
    token = cuobject_token(address, 4096, key=key)
    path, client = f"/{bucket}/last-of-all", CuObjectClient(server, token)
    client.ask("GET", path)
    client.ask("PUT", path)
    client.ask("PUT", path, {TOKEN: token + "x"})
    client.ask("GET", f"{path}?X-Amz-Rdma-Token={token}")
    client.ask("GET", path, {TOKEN: token[:-1] + "\u00e9"})
    call(server, "PUT", path, headers={"x-rdma-info": token})
    call(server, "PUT", path, headers={TOKEN: token}, body=b"x")
    audit = server.data_dir.parent / AUDIT_LOG
    wait_until(
        lambda: audit.exists() and audit.read_text().count("/last-of-all") >= 7, "the audit log"
    )
    lines = audit.read_text()
    assert re.search(r'"PUT \S+/last-of-all HTTP/1.1" 200 RDMANotSupported', lines)
    logs = [lines, *(one.read_text() for one in server.data_dir.glob("*.log"))]
    for log in logs:
        assert log
        assert f"{address:x}" not in log
        assert f"{key:x}" not in log
        assert str(address) not in log
