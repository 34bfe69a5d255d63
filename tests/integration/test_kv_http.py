"""The extension over HTTP, with numpy as the oracle."""

from __future__ import annotations

import hashlib
import secrets
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from botocore.auth import S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from objectcache_schemas.descriptor import DeliveryMode, Descriptor, MemoryTarget, OnMissing
from objectcache_schemas.layout import KvLayout
from objectcache_schemas.limits import Limits
from tests.s3_clients import (
    REGION,
    Answer,
    call,
    open_socket,
    receive_answer,
    send,
    send_head,
    signed_headers,
)
from tests.servers import RunningServer
from tests.storage_client import StorageClient, TargetClient

LAYERS, SLICE_BYTES, CHUNKS = 5, 4097, 7
LAYOUT = KvLayout(
    num_layers=LAYERS,
    chunk_tokens=16,
    per_layer_chunk_bytes=SLICE_BYTES,
    dtype="uint8",
    fingerprint="test",
)
Chunks = npt.NDArray[np.uint8]  # uint8[chunk_count, num_layers, slice_bytes]


def make_chunks(seed: int = 0, count: int = CHUNKS) -> Chunks:
    return np.random.default_rng(seed).integers(
        0, 256, (count, LAYERS, SLICE_BYTES), dtype=np.uint8
    )


def make_keys(count: int = CHUNKS) -> list[str]:
    return [f"kv/ü {index}" for index in range(count)]


def descriptor(keys: list[str], **more: Any) -> Descriptor:
    return Descriptor(
        tuple(keys), LAYERS, 16, SLICE_BYTES, **{"delivery": DeliveryMode.CHUNKWISE, **more}
    )


def put_body(asked: Descriptor, chunks: Chunks) -> bytes:
    layerwise = asked.delivery is DeliveryMode.LAYERWISE
    payload = (chunks.transpose(1, 0, 2) if layerwise else chunks).tobytes()
    head = asked.to_bytes()
    return len(head).to_bytes(4, "big") + head + payload


def kv_put(server: RunningServer, bucket: str, body: bytes, **headers: str) -> Answer:
    return call(server, "POST", f"/{bucket}?kv-put", body, headers)


def kv_get(server: RunningServer, bucket: str, asked: Descriptor) -> Answer:
    return call(server, "POST", f"/{bucket}?kv-get", asked.to_bytes())


def stored_count(server: RunningServer, bucket: str) -> int:
    listing = call(server, "GET", f"/{bucket}?list-type=2")
    return int(listing.xml.findtext("{*}KeyCount") or "-1")


@pytest.fixture
def filled(server: RunningServer, bucket: str) -> str:
    asked = descriptor(make_keys())
    assert kv_put(server, bucket, put_body(asked, make_chunks())).status == 200
    return bucket


@pytest.mark.parametrize("put_mode", [DeliveryMode.LAYERWISE, DeliveryMode.CHUNKWISE])
@pytest.mark.parametrize("get_mode", [DeliveryMode.LAYERWISE, DeliveryMode.CHUNKWISE])
def test_what_was_put_in_either_order_is_delivered_in_either_order(
    server: RunningServer, bucket: str, put_mode: DeliveryMode, get_mode: DeliveryMode
) -> None:
    chunks = make_chunks()
    answer = kv_put(server, bucket, put_body(descriptor(make_keys(), delivery=put_mode), chunks))
    assert msgspec.msgpack.decode(answer.body) == {"v": 1, "stored": CHUNKS, "existing": 0}
    answer = kv_get(server, bucket, descriptor(make_keys(), delivery=get_mode, layers=(1, 4)))
    wanted = chunks[:, 1:4]
    layerwise = get_mode is DeliveryMode.LAYERWISE
    assert answer.body == (wanted.transpose(1, 0, 2) if layerwise else wanted).tobytes()
    assert answer.headers["x-objectcache-delivery"] == get_mode.value
    assert answer.headers["x-objectcache-chunk-count"] == str(CHUNKS)
    assert answer.headers["x-objectcache-layer-bytes"] == str(CHUNKS * SLICE_BYTES)
    assert answer.headers["x-objectcache-request-id"]
    assert call(server, "GET", f"/{bucket}/kv/%C3%BC%203").body == chunks[3].tobytes()


def test_the_header_form_delivers_when_the_path_names_the_last_key(
    server: RunningServer, filled: str
) -> None:
    asked = descriptor(make_keys(), delivery=DeliveryMode.LAYERWISE)
    header = {"x-objectcache-descriptor": asked.to_header()}
    answer = call(server, "GET", f"/{filled}/kv/%C3%BC%206", headers=header)
    assert answer.body == make_chunks().transpose(1, 0, 2).tobytes()
    answer = call(server, "GET", f"/{filled}/kv/%C3%BC%205", headers=header)
    assert (answer.status, answer.code) == (400, "InvalidRequest")
    assert "kv/ü 6" in (answer.xml.findtext("Message") or "")


def presigned_get(server: RunningServer, path: str, signed: dict[str, str]) -> str:
    """Path and query of a presigned URL with these headers among the signed."""
    pair = server.credentials
    request = AWSRequest("GET", f"{server.endpoint}{path}", headers=signed)
    signer = S3SigV4QueryAuth(
        Credentials(pair.access_key, pair.secret_key), "s3", REGION, expires=60
    )
    signer.add_auth(request)
    return str(request.url).removeprefix(server.endpoint)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-objectcache-descriptor", descriptor(make_keys()[5:]).to_header()),
        ("X-ObjectCache-Descriptor", descriptor(make_keys()[5:]).to_header()),
        ("x-objectcache-path", "s3tcp"),
        ("x-objectcache-later", "1"),
    ],
)
def test_no_header_that_decides_what_is_served_can_be_added_to_a_signed_request(
    server: RunningServer, filled: str, name: str, value: str
) -> None:
    path = f"/{filled}/kv/%C3%BC%206"
    recorded = signed_headers(server, "GET", path)
    assert send(server, "GET", path, headers=recorded).body == make_chunks()[6].tobytes()
    for target, headers in ((path, recorded), (presigned_get(server, path, {}), {})):
        answer = send(server, "GET", target, headers={**headers, name: value})
        assert (answer.status, answer.code) == (403, "AccessDenied")
        assert name.lower() in (answer.xml.findtext("Message") or "")


def test_labels_of_a_request_need_not_be_signed(server: RunningServer, filled: str) -> None:
    path = f"/{filled}/kv/%C3%BC%206"
    labels = {
        "x-objectcache-request-id": "mine",
        "x-objectcache-client-seconds": "0.5",
        "traceparent": f"00-{'1' * 32}-{'2' * 16}-01",
    }
    answer = send(server, "GET", path, headers={**signed_headers(server, "GET", path), **labels})
    assert answer.status == 200
    assert answer.headers["x-objectcache-request-id"] == "mine"


def test_a_presigned_url_with_a_signed_descriptor_delivers_that_one_alone(
    server: RunningServer, filled: str
) -> None:
    signed = {"x-objectcache-descriptor": descriptor(make_keys()[5:]).to_header()}
    target = presigned_get(server, f"/{filled}/kv/%C3%BC%206", signed)
    assert send(server, "GET", target, headers=signed).body == make_chunks()[5:].tobytes()
    other = {"x-objectcache-descriptor": descriptor(make_keys()[4:]).to_header()}
    assert send(server, "GET", target, headers=other).code == "SignatureDoesNotMatch"
    assert send(server, "GET", target).code == "SignatureDoesNotMatch"


def test_a_missing_chunk_fails_by_index_or_truncates(server: RunningServer, filled: str) -> None:
    keys = [*make_keys()[:4], "absent", "kv/ü 6"]
    answer = kv_get(server, filled, descriptor(keys))
    assert (answer.status, answer.code) == (404, "NoSuchKey")
    assert answer.xml.findtext("MissingIndex") == "4"
    answer = kv_get(
        server,
        filled,
        descriptor(keys, on_missing=OnMissing.TRUNCATE),
    )
    assert answer.headers["x-objectcache-chunk-count"] == "4"
    assert answer.body == make_chunks()[:4].tobytes()


def test_a_match_counts_the_longest_stored_prefix(server: RunningServer, filled: str) -> None:
    for keys, matched in (
        (make_keys(), CHUNKS),
        ([*make_keys()[:3], "absent", "kv/ü 5"], 3),
        (["absent"], 0),
        ([], 0),
    ):
        body = msgspec.msgpack.encode({"v": 1, "chunk_keys": keys})
        answer = call(server, "POST", f"/{filled}?kv-match", body)
        assert msgspec.msgpack.decode(answer.body) == {"v": 1, "matched": matched}


def test_a_layout_is_kept_and_checked(server: RunningServer, bucket: str) -> None:
    path = f"/{bucket}?kv-layout"
    assert call(server, "GET", path).code == "NoSuchKvLayout"
    for _ in range(2):
        assert call(server, "PUT", path, LAYOUT.to_bytes()).status == 200
    assert KvLayout.from_bytes(call(server, "GET", path).body) == LAYOUT
    other = msgspec.structs.replace(LAYOUT, num_layers=LAYERS + 1)
    assert call(server, "PUT", path, other.to_bytes()).code == "KvLayoutConflict"
    wrong = Descriptor(tuple(make_keys(1)), LAYERS + 1, 16, SLICE_BYTES, DeliveryMode.CHUNKWISE)
    body = len(wrong.to_bytes()).to_bytes(4, "big") + wrong.to_bytes()
    body += bytes((LAYERS + 1) * SLICE_BYTES)
    assert kv_put(server, bucket, body).code == "DescriptorMismatch"
    assert call(server, "PUT", f"/{bucket}/k", b"too short").status in (400, 409)
    assert stored_count(server, bucket) == 0


def test_the_same_chunks_again_are_a_success_and_others_a_conflict(
    server: RunningServer, filled: str
) -> None:
    asked = descriptor(make_keys())
    again = kv_put(server, filled, put_body(asked, make_chunks()))
    assert msgspec.msgpack.decode(again.body) == {"v": 1, "stored": 0, "existing": CHUNKS}
    more = descriptor([*make_keys(), "new"])
    changed = kv_put(server, filled, put_body(more, make_chunks(seed=1, count=CHUNKS + 1)))
    assert (changed.status, changed.code) == (409, "ContentConflict")
    assert stored_count(server, filled) == CHUNKS
    assert kv_get(server, filled, asked).body == make_chunks().tobytes()


@pytest.mark.parametrize("change_bytes", [-1, 1, -SLICE_BYTES])
def test_a_payload_of_the_wrong_length_stores_nothing(
    server: RunningServer, bucket: str, change_bytes: int
) -> None:
    body = put_body(descriptor(make_keys()), make_chunks())
    body = body[:change_bytes] if change_bytes < 0 else body + bytes(change_bytes)
    assert kv_put(server, bucket, body).code == "IncompleteBody"
    assert stored_count(server, bucket) == 0


def test_a_payload_of_the_wrong_length_in_chunked_transfer_stores_nothing(
    server: RunningServer, bucket: str
) -> None:
    path = f"/{bucket}?kv-put"
    for change_bytes in (-1, 1):
        body = put_body(descriptor(make_keys()), make_chunks())
        body = body[:change_bytes] if change_bytes < 0 else body + bytes(change_bytes)
        headers = signed_headers(server, "POST", path, body, {"Transfer-Encoding": "chunked"})
        with open_socket(server) as connection:
            send_head(connection, "POST", path, headers)
            connection.sendall(f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n")
            assert receive_answer(connection).code == "IncompleteBody"
    assert stored_count(server, bucket) == 0


def test_a_body_that_differs_from_its_hash_stores_no_chunk(
    server: RunningServer, bucket: str
) -> None:
    path, body = f"/{bucket}?kv-put", put_body(descriptor(make_keys()), make_chunks())
    headers = signed_headers(server, "POST", path, body)
    tampered = body[:-1] + bytes([body[-1] ^ 1])
    assert send(server, "POST", path, tampered, headers).code == "XAmzContentSHA256Mismatch"
    assert stored_count(server, bucket) == 0
    assert send(server, "POST", path, body, headers).status == 200


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "IncompleteBody"),
        (b"\0\0", "IncompleteBody"),
        (b"\0\0\0\0", "InvalidDescriptor"),
        (b"\xff\xff\xff\xff", "DescriptorTooLarge"),
        (b"\0\0\0\x03abc", "InvalidDescriptor"),
        (b"\0\0\x10\0abc", "IncompleteBody"),
    ],
)
def test_a_hostile_start_of_a_put_is_a_400_or_413(
    server: RunningServer, bucket: str, body: bytes, code: str
) -> None:
    answer = kv_put(server, bucket, body)
    assert answer.status in (400, 413)
    assert answer.code == code


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "InvalidDescriptor"),
        (b"\x81\xa1v", "InvalidDescriptor"),
        (msgspec.msgpack.encode({"v": 1, "chunk_keys": 5}), "InvalidDescriptor"),
        (msgspec.msgpack.encode({"v": 2, "chunk_keys": []}), "InvalidDescriptor"),
        (b"\x91" * 100_000, "InvalidDescriptor"),
        (bytes(Limits().descriptor_bytes_max + 1), "DescriptorTooLarge"),
    ],
)
@pytest.mark.parametrize("operation", ["kv-get", "kv-match"])
def test_a_hostile_descriptor_is_refused_by_name(
    server: RunningServer, bucket: str, operation: str, body: bytes, code: str
) -> None:
    assert call(server, "POST", f"/{bucket}?{operation}", body).code == code


def test_more_chunks_than_the_limit_are_refused(server: RunningServer, bucket: str) -> None:
    keys = ["a"] * (Limits().chunks_per_descriptor_max + 1)
    match = msgspec.msgpack.encode({"v": 1, "chunk_keys": keys})
    for answer in (
        call(server, "POST", f"/{bucket}?kv-match", match),
        kv_get(server, bucket, Descriptor(tuple(keys), 1, 1, 1)),
    ):
        assert (answer.status, answer.code) == (413, "DescriptorTooLarge")
        assert "limits.chunks_per_descriptor_max" in (answer.xml.findtext("Message") or "")


@pytest.mark.parametrize("value", ["!!!", "A" * 17_000, "", "gaF2AQ"])
def test_a_hostile_descriptor_header_is_refused(
    server: RunningServer, filled: str, value: str
) -> None:
    headers = {"x-objectcache-descriptor": value}
    answer = call(server, "GET", f"/{filled}/k", headers=headers)
    assert answer.code in ("InvalidDescriptor", "DescriptorTooLarge")


def test_a_delivery_into_a_target_answers_with_its_outcome(
    server: RunningServer, filled: str
) -> None:
    payload_bytes = CHUNKS * LAYERS * SLICE_BYTES
    with (
        StorageClient(server.run_dir / "storage.sock") as storage,
        TargetClient(storage) as session,
    ):
        target_id, memory = session.register(payload_bytes)
        target = MemoryTarget(
            transport="shared_memory",
            target_id=target_id,
            offset_bytes=0,
            length_bytes=payload_bytes,
            tag=1,
        )
        asked = descriptor(make_keys(), delivery=DeliveryMode.LAYERWISE, rdma_target=target)
        answer = kv_get(server, filled, asked)
        assert answer.status == 200
        assert answer.headers["Transfer-Encoding"] == "chunked"
        assert answer.headers["x-objectcache-delivery"] == "layerwise"
        assert msgspec.msgpack.decode(answer.body) == {
            "v": 1,
            "chunk_count": CHUNKS,
            "payload_bytes": payload_bytes,
        }
        assert memory[:] == make_chunks().transpose(1, 0, 2).tobytes()
        unknown = msgspec.structs.replace(target, target_id=secrets.token_bytes(16))
        answer = kv_get(server, filled, descriptor(make_keys(), rdma_target=unknown))
        assert (answer.status, answer.code) == (404, "NoSuchTarget")


def test_a_session_ticket_says_where_to_present_it(server: RunningServer) -> None:
    answer = call(server, "POST", "/?kv-session")
    ticket = msgspec.msgpack.decode(answer.body)
    assert set(ticket) == {"v", "ticket", "socket_path", "host_id", "expires_s"}
    assert ticket["socket_path"] == str(server.run_dir / "targets.sock")
    assert send(server, "POST", "/?kv-session").status == 403


def test_a_large_delivery_comes_whole_and_the_connection_goes_on(
    server: RunningServer, bucket: str
) -> None:
    chunk_bytes, count = 256 << 10, 64
    keys = [f"c{index}" for index in range(count)]
    payload = secrets.token_bytes(chunk_bytes) * count
    asked = Descriptor(tuple(keys), 4, 16, chunk_bytes // 4, DeliveryMode.CHUNKWISE)
    body = len(asked.to_bytes()).to_bytes(4, "big") + asked.to_bytes() + payload
    assert kv_put(server, bucket, body).status == 200
    path, get_body = f"/{bucket}?kv-get", asked.to_bytes()
    headers = signed_headers(server, "POST", path, get_body)
    headers["Content-Length"] = str(len(get_body))
    with open_socket(server) as connection:
        for _ in range(3):
            send_head(connection, "POST", path, headers)
            connection.sendall(get_body)
            answer = receive_answer(connection)
            assert hashlib.sha256(answer.body).digest() == hashlib.sha256(payload).digest()


def test_an_error_document_is_xml_whatever_the_key_holds(
    server: RunningServer, bucket: str
) -> None:
    answer = kv_get(server, bucket, descriptor(["<a>&\x01\ufffe"]))
    assert (answer.status, answer.code) == (404, "NoSuchKey")
    assert "<a>&" in (answer.xml.findtext("Message") or "")
