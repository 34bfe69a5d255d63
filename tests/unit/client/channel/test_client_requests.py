"""The client's requests before they are sent: targets, bodies, signatures."""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np
import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from objectcache.channel import requests
from objectcache.channel.access_key import SigningKey
from objectcache.channel.endpoint import Endpoint
from objectcache.channel.requests import GatewayRequest
from objectcache.channel.signing import Signer
from objectcache.errors import InvalidRequest
from objectcache.puts.putting import payload_parts
from objectcache_schemas.delivery_paths import DeliveryPath
from objectcache_schemas.descriptor import DeliveryMode, Descriptor, MemoryTarget
from objectcache_schemas.limits import Limits

KEY = SigningKey("AKIA", "secret")


def descriptor(chunk_count: int = 2, **fields: object) -> Descriptor:
    keys = tuple(f"{index:064x}" for index in range(chunk_count))
    return Descriptor(keys, 3, 16, 40, **fields)  # type: ignore[arg-type]


def signed(request: GatewayRequest, url: str = "http://127.0.0.1:9000") -> dict[str, str]:
    return Signer(Endpoint.parse(url), "us-east-1", lambda: KEY).signed_headers(request)


def test_a_short_descriptor_travels_in_the_header_of_a_get_of_the_last_chunk() -> None:
    asked = Descriptor(("first", "dir/last key+%"), 3, 16, 40)
    request = requests.get("bucket", asked)
    assert (request.method, request.target) == ("GET", "/bucket/dir/last%20key%2B%25")
    header = request.headers["x-objectcache-descriptor"]
    assert Descriptor.from_header(header, Limits()) == asked


def test_a_long_descriptor_travels_as_a_signed_body() -> None:
    request = requests.get("bucket", descriptor(400))
    assert (request.method, request.target) == ("POST", "/bucket?kv-get")
    (body,) = request.body
    assert Descriptor.from_bytes(body, Limits()) == descriptor(400)
    assert signed(request)["x-amz-content-sha256"] == hashlib.sha256(body).hexdigest()


def test_the_two_forms_meet_at_the_header_bound() -> None:
    forms = {count: requests.get("b", descriptor(count)) for count in range(1, 100)}
    longest = max(
        len(request.headers["x-objectcache-descriptor"])
        for request in forms.values()
        if request.method == "GET"
    )
    assert 4096 - 90 < longest <= 4096
    assert {request.method for request in forms.values()} == {"GET", "POST"}


@pytest.mark.parametrize("chunk_count", [2, 400])
def test_a_get_carries_what_else_is_asked_in_either_form(chunk_count: int) -> None:
    asked = requests.get_headers("0123456789ABCDEF", DeliveryPath.AGG, "00-1-2-01")
    request = requests.get("b", descriptor(chunk_count), asked, begun_s=100.0)
    headers = signed(request.sent_at(100.25))
    assert headers["x-objectcache-request-id"] == "0123456789ABCDEF"
    assert headers["x-objectcache-path"] == "agg"
    assert headers["x-objectcache-client-seconds"] == "0.250000"
    assert headers["traceparent"] == "00-1-2-01"
    # A proxy may put its own span there.
    assert "traceparent" not in headers["authorization"]
    assert requests.get_headers("0123456789ABCDEF", None, None).keys() == {
        "x-objectcache-request-id"
    }


def test_a_get_signs_what_decides_what_is_served() -> None:
    asked = requests.get_headers("mine", DeliveryPath.AGG, f"00-{'1' * 32}-{'2' * 16}-01")
    sent = signed(requests.get("kv", descriptor(), asked, begun_s=1.0).sent_at(2.0))
    names = sent["authorization"].split("SignedHeaders=")[1].split(",")[0].split(";")
    assert {"x-objectcache-descriptor", "x-objectcache-path"} <= set(names)
    assert "traceparent" not in names


def test_a_request_that_is_sent_again_says_how_long_it_took_then() -> None:
    request = requests.get("b", descriptor(), {}, begun_s=100.0)
    assert request.sent_at(100.5).headers["x-objectcache-client-seconds"] == "0.500000"
    assert request.sent_at(99.0).headers["x-objectcache-client-seconds"] == "0.000000"
    assert requests.match("b", ["a"]).sent_at(100.5) == requests.match("b", ["a"])


def test_what_has_a_target_may_not_be_repeated() -> None:
    target = MemoryTarget(
        transport="shared_memory", target_id=bytes(16), offset_bytes=0, length_bytes=240, tag=1
    )
    assert requests.get("b", descriptor()).repeatable
    assert not requests.get("b", descriptor(rdma_target=target)).repeatable
    assert requests.put("b", descriptor(), []).repeatable
    assert not requests.put("b", descriptor(rdma_target=target), []).repeatable
    assert not requests.create_bucket("b", "us-east-1").repeatable


def test_a_put_is_length_descriptor_and_the_callers_own_memory() -> None:
    chunks = np.arange(240, dtype=np.uint8).reshape(2, 3, 40)
    parts = payload_parts(chunks, (2, 3, 40), "chunks")
    request = requests.put("b", descriptor(delivery=DeliveryMode.CHUNKWISE), parts)
    preamble, payload = request.body
    length_bytes = int.from_bytes(preamble[:4], "big")
    assert length_bytes == len(preamble) - 4
    assert Descriptor.from_bytes(preamble[4:], Limits()).delivery is DeliveryMode.CHUNKWISE
    assert np.shares_memory(np.frombuffer(payload, np.uint8), chunks)
    assert request.body_bytes == len(preamble) + 240


def test_a_streamed_put_announces_the_length_of_the_whole() -> None:
    head = requests.put_head("b", descriptor())
    assert int(head.headers["content-length"]) == head.body_bytes + 2 * 3 * 40


def test_bodies_are_signed_except_payloads_on_links_that_protect_them() -> None:
    payload = memoryview(bytes(240))
    put = requests.put("b", descriptor(), [payload])
    digest = hashlib.sha256(b"".join(put.body)).hexdigest()
    for url in ("http://127.0.0.1:1", "http://[::1]:1", "http://localhost", "https://far.example"):
        assert signed(put, url)["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    assert signed(put, "http://far.example")["x-amz-content-sha256"] == digest
    match = requests.match("b", ["k"])
    assert signed(match, "https://far.example")["x-amz-content-sha256"] != "UNSIGNED-PAYLOAD"


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:9000", "http://far.example", "https://far.example:8443", "http://[::1]:80"],
)
def test_the_signature_is_botocores(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import datetime

    now = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    monkeypatch.setattr("botocore.auth.get_current_datetime", lambda: now)
    request = requests.match("bucket", ["k1", "k2"])
    ours = signed(request, url)
    theirs = AWSRequest(
        "POST",
        url + "/bucket?kv-match",
        headers={"content-type": "application/msgpack"},
        data=request.body[0],
    )
    S3SigV4Auth(Credentials(*KEY), "s3", "us-east-1").add_auth(theirs)
    assert ours["authorization"] == theirs.headers["Authorization"]
    assert ours["x-amz-date"] == "20260102T030405Z"


def test_a_session_token_is_signed_and_sent() -> None:
    signer = Signer(
        Endpoint.parse("http://h"), "us-east-1", lambda: SigningKey("a", "s", "the-token")
    )
    headers = signer.signed_headers(requests.open_session("boot"))
    assert headers["x-amz-security-token"] == "the-token"
    assert "x-amz-security-token" in headers["authorization"]


def test_an_access_key_does_not_show_its_secret() -> None:
    assert "secret" not in repr(KEY)


def test_a_location_constraint_is_sent_for_other_regions_only() -> None:
    assert requests.create_bucket("b", "us-east-1").body == ()
    (body,) = requests.create_bucket("b", "eu<1").body
    assert b"<LocationConstraint>eu&lt;1</LocationConstraint>" in body


def test_a_match_names_its_keys() -> None:
    (body,) = requests.match("b", ["k1", "k2"]).body
    assert msgspec.msgpack.decode(body) == {"v": 1, "chunk_keys": ["k1", "k2"]}


@pytest.mark.parametrize("bucket", ["", "a/b"])
def test_no_bucket_name_leaves_its_place_in_the_path(bucket: str) -> None:
    with pytest.raises(InvalidRequest, match="bucket"):
        requests.get_layout(bucket)


def test_keys_that_are_no_text_are_refused() -> None:
    with pytest.raises(InvalidRequest):
        requests.match("b", ["\ud800"])
    with pytest.raises(InvalidRequest):
        requests.get("b", Descriptor(("\ud800",), 1, 1, 1))


@pytest.mark.parametrize(
    ("url", "host", "port", "header"),
    [
        ("http://127.0.0.1:9000", "127.0.0.1", 9000, "127.0.0.1:9000"),
        ("https://s3.example/", "s3.example", 443, "s3.example"),
        ("https://s3.example:80", "s3.example", 80, "s3.example:80"),
        ("http://[::1]:9000", "::1", 9000, "[::1]:9000"),
    ],
)
def test_an_endpoint_is_host_and_port(url: str, host: str, port: int, header: str) -> None:
    endpoint = Endpoint.parse(url)
    assert (endpoint.host, endpoint.port, endpoint.host_header) == (host, port, header)


@pytest.mark.parametrize(
    "url", ["127.0.0.1:9000", "ftp://h", "http://", "http://h/path", "http://h:x", "http://u@h"]
)
def test_a_wrong_endpoint_is_named(url: str) -> None:
    with pytest.raises(InvalidRequest, match="endpoint"):
        Endpoint.parse(url)


@pytest.mark.parametrize("kind", ["array", "list", "bytes", "buffer", "strided", "int8"])
def test_chunks_may_be_arrays_of_their_shape_or_raw_bytes(kind: str) -> None:
    chunks = np.random.default_rng(1).integers(0, 256, (2, 3, 40), dtype=np.uint8)
    data = {
        "array": chunks,
        "list": [chunks[0], bytes(chunks[1].tobytes())],
        "bytes": chunks.tobytes(),
        "strided": chunks.transpose(1, 0, 2).copy().transpose(1, 0, 2),
        "buffer": memoryview(bytearray(chunks.tobytes())),
        "int8": chunks.view(np.int8).data,
    }[kind]
    assert b"".join(payload_parts(data, (2, 3, 40), "chunks")) == chunks.tobytes()


def test_chunks_of_another_size_are_refused_with_both_sizes() -> None:
    with pytest.raises(InvalidRequest, match=r"239 bytes.*needs 240"):
        payload_parts(bytes(239), (2, 3, 40), "chunks")
    with pytest.raises(InvalidRequest, match="chunks"):
        payload_parts(object(), (2, 3, 40), "chunks")


CHUNKS = np.zeros((2, 3, 40), np.uint8)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (CHUNKS.transpose(1, 0, 2), r"shape \(3, 2, 40\).*uint8 of shape \(2, 3, 40\)"),
        (CHUNKS.reshape(-1), r"shape \(240,\)"),
        (CHUNKS[:1], r"the layout needs uint8 of shape \(2, 3, 40\); it has 120 bytes of 240$"),
        (
            CHUNKS.view(np.float16),
            r"float16 of shape \(2, 3, 20\).*view\(numpy\.uint8\)\.reshape\(",
        ),
        (np.zeros((2, 3, 40), np.float32), "float32"),
        (CHUNKS.transpose(1, 0, 2).data, r"shape \(3, 2, 40\)"),
        ([CHUNKS[0], CHUNKS[1].T], r"chunks\[1\].*shape \(40, 3\).*shape \(3, 40\)"),
        ([CHUNKS[0], bytes(119)], r"chunks\[1\] holds 119 bytes, the layout needs 120"),
        ([bytes(60)] * 4, "a list of 4, the layout needs 2"),
        ([1, 2], r"chunks\[0\]: "),
        ("text", "chunks: "),
    ],
)
def test_bytes_in_another_order_are_refused_with_both_shapes(data: object, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        payload_parts(data, (2, 3, 40), "chunks")
