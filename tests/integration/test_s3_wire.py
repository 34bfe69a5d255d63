"""What no well-behaved client sends, and what connections do besides requests."""

from __future__ import annotations

import base64
import gzip
import hashlib
import hmac
import http.client
import os
import re
import resource
import secrets
import socket
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.s3_clients import (
    Answer,
    call,
    open_socket,
    presigned_path,
    receive_answer,
    s3_client,
    send,
    send_head,
    signed_headers,
)
from tests.servers import RunningServer, start_server

MIB = 1 << 20
DEADLINE_S = 20.0
STALL_S = 1.0


def until(holds: Callable[[], bool]) -> None:
    """Ask again and again until it holds, within a bound."""
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, "it never held"


def receive_rest(connection: socket.socket) -> bytes:
    """All bytes until the peer closes."""
    data = bytearray()
    try:
        while piece := connection.recv(1 << 20):
            data += piece
    except ConnectionResetError:
        pass
    return bytes(data)


def is_stored(server: RunningServer, bucket: str, key: str) -> bool:
    return call(server, "HEAD", f"/{bucket}/{key}").status == 200


# --- heads ---------------------------------------------------------------------------------------


def test_every_answer_carries_its_request_id_and_no_software_version(
    server: RunningServer, bucket: str
) -> None:
    answers = [
        call(server, "GET", "/"),
        call(server, "GET", f"/{bucket}/absent"),
        send(server, "GET", "/"),
        send(server, "GET", "/healthz"),
    ]
    assert [answer.status for answer in answers] == [200, 404, 403, 200]
    for answer in answers:
        request_id = answer.headers["x-amz-request-id"]
        assert re.fullmatch("[0-9A-F]{16}", request_id)
        assert answer.headers["x-objectcache-request-id"] == request_id
        assert answer.headers["Server"] == "ObjectCache"
    assert answers[1].xml.findtext("RequestId") == answers[1].headers["x-amz-request-id"]
    assert answers[1].xml.findtext("Resource") == f"/{bucket}/absent"


def test_a_bucket_called_healthz_is_reached_by_signed_requests(server: RunningServer) -> None:
    assert call(server, "HEAD", "/healthz").status == 404
    signed = call(server, "GET", "/healthz")  # there is no such bucket yet
    assert (signed.status, b'"ok"' in signed.body) == (200, True)
    assert call(server, "PUT", "/healthz").status == 200
    assert call(server, "PUT", "/healthz/k", b"1").status == 200
    assert call(server, "GET", "/healthz").xml.findtext(".//{*}Key") == "k"
    assert b'"ok"' in send(server, "GET", "/healthz").body


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 tls?\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nbad header\r\n\r\n",
        b"PUT /b/k HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"PUT /b/k HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
        b"GET /sekret HTTP/1.1\r\nHost: a\r\nx-amz-meta-a: " + b"y" * 40_000 + b"\r\n\r\n",
        b"GET /sekret" + b"y" * 40_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    ],
)
def test_garbage_is_answered_with_an_error_that_echoes_nothing(
    server: RunningServer, garbage: bytes
) -> None:
    with open_socket(server) as connection:
        connection.sendall(garbage)
        answer = receive_rest(connection)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b" 400 " in head.split(b"\r\n")[0]
    assert b"<Code>InvalidRequest</Code>" in body
    assert b"sekret" not in answer
    assert b"aiohttp" not in answer
    assert send(server, "GET", "/healthz").status == 200


@pytest.mark.parametrize("target", ["*", "/%FF%FE", "/bbb/%FF%FE", "/bbb/a%00b", "//key", "/A_b/k"])
def test_a_target_that_names_nothing_is_a_400(server: RunningServer, target: str) -> None:
    answer = call(server, "GET", target)
    assert answer.status == 400
    assert answer.code in ("InvalidArgument", "InvalidBucketName", "InvalidRequest")


def test_a_key_of_1025_bytes_is_refused(server: RunningServer, bucket: str) -> None:
    assert call(server, "PUT", f"/{bucket}/{'k' * 1025}", b"1").code == "KeyTooLongError"
    assert call(server, "PUT", f"/{bucket}/{'%C3%BC' * 512}", b"1").status == 200


def test_an_absolute_form_target_is_the_same_request(server: RunningServer, bucket: str) -> None:
    call(server, "PUT", f"/{bucket}/k", b"abc")
    path, host = f"/{bucket}/k", f"{server.host}:{server.port}"
    for authority, status in ((host, 200), ("other.example", 400)):
        with open_socket(server) as connection:
            send_head(
                connection, "GET", f"http://{authority}{path}", signed_headers(server, "GET", path)
            )
            answer = receive_answer(connection)
        assert answer.status == status


def test_a_host_below_the_domain_names_the_bucket(server: RunningServer, bucket: str) -> None:
    host = f"{bucket}.localhost:{server.port}"
    assert call(server, "PUT", "/dir//k", b"virtual", host=host).status == 200
    assert call(server, "GET", f"/{bucket}/dir//k").body == b"virtual"
    listing = call(server, "GET", "/?list-type=2", host=host)
    assert listing.xml.findtext(".//{*}Key") == "dir//k"


def test_unknown_queries_and_methods_are_not_taken_for_something_else(
    server: RunningServer, bucket: str
) -> None:
    call(server, "PUT", f"/{bucket}/k", b"kept")
    refused = [
        ("PUT", f"/{bucket}/k?retention", 501),
        ("PUT", f"/{bucket}/k?frobnicate=1", 501),
        ("DELETE", f"/{bucket}/k?retention", 501),
        ("GET", f"/{bucket}/k?torrent", 501),
        ("POST", f"/{bucket}", 501),
        ("DELETE", f"/{bucket}?policy", 501),
        ("PUT", "/", 501),
        ("OPTIONS", f"/{bucket}/k", 400),
        ("PATCH", f"/{bucket}/k", 405),
        ("GET", f"/{bucket}/k?versionId=7", 400),
    ]
    for method, path, status in refused:
        assert call(server, method, path, b"x" if method == "PUT" else b"").status == status, path
    assert call(server, "GET", f"/{bucket}/k").body == b"kept"


@pytest.mark.parametrize(
    "headers",
    [
        {"x-amz-server-side-encryption-customer-algorithm": "AES256"},
        {"x-amz-object-lock-mode": "GOVERNANCE"},
        {"x-amz-write-offset-bytes": "0"},
    ],
)
def test_headers_that_ask_for_more_are_refused(
    server: RunningServer, bucket: str, headers: dict[str, str]
) -> None:
    answer = call(server, "PUT", f"/{bucket}/k", b"1", headers)
    assert answer.code in ("NotImplemented", "InvalidArgument")
    assert not is_stored(server, bucket, "k")


def test_an_expectation_that_s3_does_not_know_is_not_heeded(
    server: RunningServer, bucket: str
) -> None:
    assert call(server, "PUT", f"/{bucket}/k", b"1", {"Expect": "200-ok"}).status == 200
    assert call(server, "GET", f"/{bucket}/k").body == b"1"


def test_deleting_many_needs_something_that_vouches_for_the_body(
    server: RunningServer, bucket: str
) -> None:
    body = b"<Delete><Object><Key>k</Key></Object></Delete>"
    path = f"/{bucket}?delete"
    named = signed_headers(server, "POST", path, body, payload_hash="UNSIGNED-PAYLOAD")
    assert send(server, "POST", path, body, named).code == "InvalidRequest"
    md5 = base64.b64encode(hashlib.md5(body).digest()).decode()
    named = signed_headers(
        server, "POST", path, body, {"Content-MD5": md5}, payload_hash="UNSIGNED-PAYLOAD"
    )
    assert send(server, "POST", path, body, named).status == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not xml",
        b"<Other/>",
        b"<Delete></Delete>",
        b"<Delete><Object></Object></Delete>",
        b'<!DOCTYPE d [<!ENTITY e "x">]><Delete><Object><Key>&e;</Key></Object></Delete>',
        b"<Delete>" + b"<Object><Key>k</Key></Object>" * 1001 + b"</Delete>",
    ],
)
def test_xml_that_is_not_the_operations_is_malformed(
    server: RunningServer, bucket: str, body: bytes
) -> None:
    assert call(server, "POST", f"/{bucket}?delete", body).code == "MalformedXML"


# --- bodies --------------------------------------------------------------------------------------


def test_a_put_without_a_length_is_refused(server: RunningServer, bucket: str) -> None:
    path = f"/{bucket}/k"
    with open_socket(server) as connection:
        send_head(connection, "PUT", path, signed_headers(server, "PUT", path))
        answer = receive_answer(connection)
    assert (answer.status, answer.code) == (411, "MissingContentLength")
    assert not is_stored(server, bucket, "k")


def test_a_transfer_encoding_other_than_chunked_is_refused(
    server: RunningServer, bucket: str
) -> None:
    path = f"/{bucket}/k"
    headers = signed_headers(server, "PUT", path, headers={"Transfer-Encoding": "gzip, chunked"})
    with open_socket(server) as connection:
        send_head(connection, "PUT", path, headers)
        connection.sendall(b"0\r\n\r\n")
        answer = receive_answer(connection)
    assert answer.status in (400, 501)
    assert not is_stored(server, bucket, "k")


def test_a_body_that_says_it_is_gzip_is_stored_as_it_came(
    server: RunningServer, bucket: str
) -> None:
    body = gzip.compress(b"x" * 100_000)
    call(server, "PUT", f"/{bucket}/k", body, {"Content-Encoding": "gzip"})
    answer = call(server, "GET", f"/{bucket}/k")
    assert answer.body == body
    assert answer.headers["Content-Encoding"] == "gzip"


def test_a_body_that_differs_from_its_signed_hash_is_not_stored(
    server: RunningServer, bucket: str
) -> None:
    path, body = f"/{bucket}/k", b"a" * 200_000
    named = signed_headers(server, "PUT", path, body)
    answer = send(server, "PUT", path, b"b" * 200_000, named)
    assert (answer.status, answer.code) == (400, "XAmzContentSHA256Mismatch")
    assert not is_stored(server, bucket, "k")


class SignedChunks:
    """A STREAMING-AWS4-HMAC-SHA256-PAYLOAD upload, written from Amazon's description."""

    def __init__(self, server: RunningServer, path: str, chunks: list[bytes]) -> None:
        length_bytes = sum(map(len, chunks))
        self.headers = signed_headers(
            server,
            "PUT",
            path,
            headers={
                "Content-Encoding": "aws-chunked",
                "x-amz-decoded-content-length": str(length_bytes),
            },
            payload_hash="STREAMING-AWS4-HMAC-SHA256-PAYLOAD",
        )
        authorization = self.headers["Authorization"]
        previous = authorization.rpartition("Signature=")[2]
        match = re.search(r"Credential=[^/]+/(\d+)/([^/]+)/s3/aws4_request", authorization)
        assert match is not None
        key = b"AWS4" + server.credentials.secret_key.encode()
        for part in (match[1], match[2], "s3", "aws4_request"):
            key = hmac.digest(key, part.encode(), "sha256")
        scope = f"{match[1]}/{match[2]}/s3/aws4_request"
        self.body = bytearray()
        empty = hashlib.sha256(b"").hexdigest()
        for chunk in [*chunks, b""]:
            text = "\n".join(
                (
                    "AWS4-HMAC-SHA256-PAYLOAD",
                    self.headers["X-Amz-Date"],
                    scope,
                    previous,
                    empty,
                    hashlib.sha256(chunk).hexdigest(),
                )
            )
            previous = hmac.digest(key, text.encode(), "sha256").hex()
            self.body += f"{len(chunk):x};chunk-signature={previous}\r\n".encode()
            self.body += chunk + b"\r\n"


def test_signed_chunks_are_stored_and_a_tampered_one_stores_nothing(
    server: RunningServer, bucket: str
) -> None:
    path = f"/{bucket}/k"
    upload = SignedChunks(server, path, [b"a" * 100_000, b"b" * 65_536, b"c"])
    tampered = bytes(upload.body).replace(b"b" * 65_536, b"b" * 65_535 + b"x")  # no signature
    answer = send(server, "PUT", path, tampered, upload.headers)
    assert (answer.status, answer.code) == (403, "SignatureDoesNotMatch")
    assert not is_stored(server, bucket, "k")
    assert send(server, "PUT", path, bytes(upload.body), upload.headers).status == 200
    answer = call(server, "GET", path)
    assert answer.body == b"a" * 100_000 + b"b" * 65_536 + b"c"
    assert answer.headers["Content-Encoding"] is None


@pytest.mark.parametrize("crc", ["right", "wrong"])
def test_an_unsigned_trailer_in_chunked_transfer_is_verified(
    server: RunningServer, bucket: str, crc: str
) -> None:
    path, body = f"/{bucket}/k", secrets.token_bytes(150_000)
    value = base64.b64encode((zlib.crc32(body) ^ (crc == "wrong")).to_bytes(4, "big")).decode()
    framed = f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n"
    framed += f"x-amz-checksum-crc32:{value}\r\n\r\n".encode()
    headers = signed_headers(
        server,
        "PUT",
        path,
        headers={
            "Content-Encoding": "aws-chunked",
            "Transfer-Encoding": "chunked",
            "x-amz-decoded-content-length": str(len(body)),
            "x-amz-trailer": "x-amz-checksum-crc32",
        },
        payload_hash="STREAMING-UNSIGNED-PAYLOAD-TRAILER",
    )
    with open_socket(server) as connection:
        send_head(connection, "PUT", path, headers)
        for start in range(0, len(framed), 40_000):
            piece = framed[start : start + 40_000]
            connection.sendall(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        connection.sendall(b"0\r\n\r\n")
        answer = receive_answer(connection)
    if crc == "right":
        assert answer.status == 200
        assert call(server, "GET", path).body == body
    else:
        assert (answer.status, answer.code) == (400, "BadDigest")
        assert not is_stored(server, bucket, "k")


@pytest.mark.parametrize(
    ("path", "code"), [("/absent-bucket/k", "NoSuchBucket"), ("/{bucket}/k", None)]
)
def test_a_client_that_waits_is_told_to_go_on_only_after_all_checks(
    server: RunningServer, bucket: str, path: str, code: str | None
) -> None:
    path = path.format(bucket=bucket)
    headers = signed_headers(server, "PUT", path, b"body")
    headers |= {"Expect": "100-Continue", "Content-Length": "4"}
    with open_socket(server) as connection:
        send_head(connection, "PUT", path, headers)
        if code is not None:
            answer = receive_answer(connection)
            assert (answer.code, answer.headers["Connection"]) == (code, "close")
            return
        assert connection.recv(1024) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"body")
        assert receive_answer(connection).status == 200


def test_a_client_that_waits_with_a_wrong_signature_is_denied_first(
    server: RunningServer, bucket: str
) -> None:
    headers = signed_headers(server, "PUT", f"/{bucket}/other", b"body")
    headers |= {"Expect": "100-continue", "Content-Length": "4"}
    with open_socket(server) as connection:
        send_head(connection, "PUT", f"/{bucket}/k", headers)
        assert receive_answer(connection).code == "SignatureDoesNotMatch"


def test_an_early_answer_to_a_large_body_is_read_and_the_connection_ends(
    server: RunningServer, bucket: str
) -> None:
    with open_socket(server) as connection:
        send_head(connection, "PUT", f"/{bucket}/k", {"Host": "x", "Content-Length": str(4 * MIB)})
        connection.sendall(b"x" * 4 * MIB)
        answer = receive_answer(connection)
        assert (answer.status, answer.headers["Connection"]) == (403, "close")
        assert receive_rest(connection) == b""


def test_an_early_answer_to_a_small_body_keeps_the_connection(
    server: RunningServer, bucket: str
) -> None:
    with open_socket(server) as connection:
        for _ in range(2):
            send_head(connection, "PUT", f"/{bucket}/k", {"Host": "x", "Content-Length": "5"})
            connection.sendall(b"small")
            assert receive_answer(connection).status == 403


@pytest.mark.parametrize("named", [{}, {"Expect": "200-ok"}, {"Expect": "100-continue"}])
def test_an_early_answer_does_not_wait_for_the_body(
    server: RunningServer, bucket: str, named: dict[str, str]
) -> None:
    path = f"/{bucket}/absent?retention"
    headers = signed_headers(server, "PUT", path, b"x" * 10, named) | {"Content-Length": "10"}
    with open_socket(server) as connection:
        send_head(connection, "PUT", path, headers)
        answer = receive_answer(connection)  # before a byte of the body was sent
        assert answer.status in (400, 501)
        assert answer.headers["Connection"] == ("close" if named else None)
        connection.sendall(b"x" * 10)
        if named:
            assert receive_rest(connection) == b""
        else:  # a server that had waited would have given the connection up
            send_head(connection, "GET", "/healthz", {"Host": "x"})
            assert receive_answer(connection).status == 200


def test_a_refused_request_whose_body_is_still_to_come_takes_no_place_of_another(
    tmp_path: Path,
) -> None:
    settings = ("storage.engine=memory", "gateway.requests_in_flight_max=1")
    with start_server(tmp_path / "data", *settings) as server, open_socket(server) as connection:
        send_head(connection, "PUT", "/bbb/k", {"Host": "x", "Content-Length": str(4 * MIB)})
        assert receive_answer(connection).status == 403
        assert call(server, "GET", "/").status == 200


def test_a_client_that_leaves_in_the_middle_of_a_put_stores_nothing(
    server: RunningServer, bucket: str
) -> None:
    path = f"/{bucket}/left-in-the-middle"
    headers = signed_headers(server, "PUT", path, b"x" * MIB)
    headers["Content-Length"] = str(MIB)
    with open_socket(server) as connection:
        send_head(connection, "PUT", path, headers)
        connection.sendall(b"x" * (MIB // 2))
    log = server.data_dir / "gateway.log"
    aborted = '"method":"PUT","status":"aborted","operation":"PutObject"'
    until(lambda: aborted in log.read_text())
    assert not is_stored(server, bucket, "left-in-the-middle")


# --- connections ---------------------------------------------------------------------------------


def test_requests_on_one_connection_follow_each_other_whatever_way_bodies_take(
    server: RunningServer, bucket: str
) -> None:
    bodies = {size: secrets.token_bytes(size) for size in (10, 3 * MIB, 70_000, 65_536)}
    for size, body in bodies.items():
        call(server, "PUT", f"/{bucket}/{size}", body)
    connection = http.client.HTTPConnection(server.host, server.port, timeout=DEADLINE_S)
    for size, body in [*bodies.items()] * 2:
        path = f"/{bucket}/{size}"
        connection.request("HEAD", path, headers=signed_headers(server, "HEAD", path))
        response = connection.getresponse()
        assert (response.headers["Content-Length"], response.read()) == (str(size), b"")
        connection.request("GET", path, headers=signed_headers(server, "GET", path))
        assert connection.getresponse().read() == body
    connection.close()


def test_pipelined_requests_are_answered_in_order(server: RunningServer, bucket: str) -> None:
    sizes = [2 * MIB, 5, 300_000, 0, 100_000]
    bodies = [secrets.token_bytes(size) for size in sizes]
    for index, body in enumerate(bodies):
        call(server, "PUT", f"/{bucket}/{index}", body)
    with open_socket(server) as connection:
        for index in range(len(bodies)):
            path = f"/{bucket}/{index}"
            send_head(connection, "GET", path, signed_headers(server, "GET", path))
        reader = connection.makefile("rb")
        for body in bodies:
            lengths = [
                int(line.split(b":")[1])
                for line in iter(reader.readline, b"\r\n")
                if line.lower().startswith(b"content-length")
            ]
            assert reader.read(lengths[0]) == body


@pytest.fixture
def slow_server(tmp_path: Path) -> Iterator[RunningServer]:
    with start_server(
        tmp_path / "data",
        "storage.engine=memory",
        f"storage.send_stall_timeout_s={STALL_S}",
    ) as running:
        yield running


BODY_STALL = f"gateway.body_stall_timeout_s={STALL_S}"


def test_a_body_that_stops_arriving_is_given_up(slow_server: RunningServer) -> None:
    slow_server.restart_gateway(BODY_STALL)
    call(slow_server, "PUT", "/bbb")
    headers = signed_headers(slow_server, "PUT", "/bbb/k", b"xxxx")
    headers["Content-Length"] = "4"
    with open_socket(slow_server) as connection:
        send_head(connection, "PUT", "/bbb/k", headers)
        connection.sendall(b"xx")
        answer = receive_answer(connection)  # without another byte from the client
    assert (answer.status, answer.code, answer.headers["Connection"]) == (
        400,
        "RequestTimeout",
        "close",
    )
    assert not is_stored(slow_server, "bbb", "k")


@pytest.mark.parametrize("handover", ["true", "false"])
def test_a_client_that_takes_no_byte_of_its_body_is_cut(
    slow_server: RunningServer, handover: str
) -> None:
    call(slow_server, "PUT", "/bbb")
    assert call(slow_server, "PUT", "/bbb/k", b"x" * 32 * MIB).status == 200
    slow_server.restart_gateway(BODY_STALL, f"gateway.body_handover={handover}")
    with open_socket(slow_server) as connection:
        send_head(connection, "GET", "/bbb/k", signed_headers(slow_server, "GET", "/bbb/k"))
        log = slow_server.data_dir / "gateway.log"
        aborted = '"method":"GET","status":"aborted","operation":"GetObject"'
        until(lambda: aborted in log.read_text())
        assert len(receive_rest(connection)) < 32 * MIB
        assert '"level":"warning"' not in log.read_text()
    until(lambda: comes_whole(slow_server))


def comes_whole(server: RunningServer) -> bool:
    """A busy machine may let this reader, too, take nothing for a second."""
    try:
        return len(call(server, "GET", "/bbb/k").body) == 32 * MIB
    except (http.client.HTTPException, OSError):
        return False


# --- limits, ends and beginnings -----------------------------------------------------------------


def begin_put(server: RunningServer, path: str, body: bytes) -> socket.socket:
    """A put in flight: the server has asked for its body."""
    headers = signed_headers(server, "PUT", path, body)
    headers |= {"Expect": "100-continue", "Content-Length": str(len(body))}
    connection = open_socket(server)
    send_head(connection, "PUT", path, headers)
    assert connection.recv(1024).startswith(b"HTTP/1.1 100 ")
    return connection


def is_slow_down(answer: Answer) -> bool:
    return (answer.status, answer.code, answer.headers["Retry-After"]) == (503, "SlowDown", "1")


def test_requests_over_the_limit_are_told_to_slow_down(tmp_path: Path) -> None:
    settings = ("storage.engine=memory", "gateway.requests_in_flight_max=1")
    with start_server(tmp_path / "data", *settings) as server:
        call(server, "PUT", "/bbb")
        with begin_put(server, "/bbb/k", b"body") as connection:
            assert is_slow_down(call(server, "GET", "/bbb/k"))
            assert send(server, "GET", "/healthz").status == 200
            connection.sendall(b"body")
            assert receive_answer(connection).status == 200
        assert call(server, "GET", "/bbb/k").body == b"body"


def test_a_user_whose_connections_all_work_is_told_to_slow_down_at_the_limit(
    tmp_path: Path,
) -> None:
    settings = ("storage.engine=memory", "gateway.connections_max=2")
    with start_server(tmp_path / "data", *settings) as server:
        call(server, "PUT", "/bbb")
        with begin_put(server, "/bbb/k", b"body") as connection:
            assert is_slow_down(call(server, "GET", "/bbb/k"))
            connection.sendall(b"body")
            assert receive_answer(connection).status == 200
            assert call(server, "GET", "/bbb/k").body == b"body"  # in the place of what is idle
            assert receive_rest(connection) == b""


@pytest.mark.parametrize("handover", ["true", "false"])
def test_a_storage_server_that_dies_cuts_the_body_and_its_successor_is_found(
    tmp_path: Path, handover: str
) -> None:
    body = secrets.token_bytes(48 * MIB)
    with start_server(tmp_path / "data", f"gateway.body_handover={handover}") as server:
        call(server, "PUT", "/bbb")
        call(server, "PUT", "/bbb/k", body)
        with open_socket(server) as connection:
            send_head(connection, "GET", "/bbb/k", signed_headers(server, "GET", "/bbb/k"))
            first = connection.recv(1 << 20)
            server.kill_storage()
            rest = receive_rest(connection)
        assert b"200 OK" in first[:20]
        assert len(first) + len(rest) < len(body)
        assert send(server, "GET", "/healthz").status == 503
        if handover == "true":  # once: the gateway waits some seconds for a successor
            answer = call(server, "GET", "/bbb/k")
            assert (answer.status, answer.code) == (503, "ServiceUnavailable")
        server.restart_storage()
        assert call(server, "GET", "/bbb/k").body == body


def test_a_restart_of_the_storage_server_between_requests_is_not_noticed(tmp_path: Path) -> None:
    with start_server(tmp_path / "data") as server:
        call(server, "PUT", "/bbb")
        call(server, "PUT", "/bbb/k", b"abc")
        server.kill_storage()
        server.restart_storage()
        assert call(server, "GET", "/bbb/k").body == b"abc"


def test_processes_that_disagree_on_limits_do_not_serve_together(tmp_path: Path) -> None:
    with start_server(tmp_path / "data", "storage.engine=memory") as server:
        server.restart_gateway("limits.put_chunks_max=7")
        answer = call(server, "GET", "/")
        assert (answer.status, answer.code) == (503, "ServiceUnavailable")
        assert "[limits]" in (answer.xml.findtext("Message") or "")


def refuses_connections(server: RunningServer) -> bool:
    try:
        open_socket(server).close()
    except (ConnectionRefusedError, ConnectionResetError):
        return True
    return False


def test_a_gateway_that_is_told_to_stop_finishes_what_it_began(tmp_path: Path) -> None:
    with start_server(tmp_path / "data") as server:
        call(server, "PUT", "/bbb")
        with begin_put(server, "/bbb/k", b"body") as putting, open_socket(server) as open_before:
            send_head(open_before, "GET", "/", signed_headers(server, "GET", "/"))
            assert receive_answer(open_before).headers["Connection"] is None
            server.gateway.signal_stop()
            until(lambda: refuses_connections(server))
            send_head(open_before, "GET", "/", signed_headers(server, "GET", "/"))
            assert receive_answer(open_before).headers["Connection"] == "close"
            putting.sendall(b"body")
            answer = receive_answer(putting)
            assert (answer.status, answer.headers["Connection"]) == (200, "close")
        assert server.gateway.wait() == 0
        server.restart_gateway()
        assert call(server, "GET", "/bbb/k").body == b"body"


def test_a_gateway_that_cannot_drain_in_time_stops_all_the_same(tmp_path: Path) -> None:
    with start_server(tmp_path / "data", "gateway.drain_timeout_s=0.2") as server:
        call(server, "PUT", "/bbb")
        with begin_put(server, "/bbb/k", b"body"):
            server.gateway.signal_stop()
            assert server.gateway.wait() == 0


def lowest_free_descriptor(pid: int) -> int:
    used = {int(entry) for entry in os.listdir(f"/proc/{pid}/fd")}
    return next(number for number in range(len(used) + 1) if number not in used)


def test_a_gateway_without_a_descriptor_left_is_busy(tmp_path: Path) -> None:
    with (
        start_server(tmp_path / "data", "storage.engine=memory") as server,
        open_socket(server) as connection,
    ):
        send_head(connection, "GET", "/", {"Host": "x"})
        assert receive_answer(connection).status == 403  # accepted, and the storage not asked
        pid = server.gateway_pid
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest_free_descriptor(pid), before[1]))
        send_head(connection, "GET", "/", signed_headers(server, "GET", "/"))
        assert is_slow_down(receive_answer(connection))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        send_head(connection, "GET", "/", signed_headers(server, "GET", "/"))
        assert receive_answer(connection).status == 200
        assert "Traceback" not in (server.data_dir / "gateway.log").read_text()


def test_the_access_log_holds_names_but_no_secret(server: RunningServer, bucket: str) -> None:
    client: Any = s3_client(server)
    path = presigned_path(client, "put_object", {"Bucket": bucket, "Key": "log\nged"})
    client.close()
    assert send(server, "PUT", path, b"1").status == 200
    line = f'"status":200,"operation":"PutObject","bucket":"{bucket}","key":"log\\\\nged"'
    until(lambda: line in (server.data_dir / "gateway.log").read_text())
    log = (server.data_dir / "gateway.log").read_text()
    assert "X-Amz" not in log
    assert "Signature=" not in log
    assert server.credentials.secret_key not in log
