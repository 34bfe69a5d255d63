"""S3 of chunks that are stored as frames: put so, or encoded by upkeep where they lay."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from botocore.exceptions import ClientError

from objectcache_schemas.descriptor import DeliveryMode, Descriptor
from objectcache_schemas.layout import KvLayout
from objectcache_schemas.limits import KIB, MIB
from objectcache_schemas.messages.buckets import SetLayout, SetPolicy
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.messages.quotas import BucketUsage, GetUsage, Usage
from objectcache_schemas.operators.engine_status import EngineState, EngineStatus, GetEngineStatus
from objectcache_schemas.records import BucketPolicy, StoredEncoding
from tests.integration.served import wait_until
from tests.s3_clients import call, close_clients, s3_client
from tests.servers import RunningServer, start_server
from tests.storage_client import StorageClient

LAYOUT = KvLayout(
    num_layers=4,
    chunk_tokens=16,
    per_layer_chunk_bytes=33 * KIB,
    dtype="torch.bfloat16",
    fingerprint="encoded",
)
SLICE_BYTES, CHUNK_BYTES = LAYOUT.per_layer_chunk_bytes, LAYOUT.chunk_bytes
KEYS = tuple(f"chunk {number}" for number in range(3))
PART_BYTES = 5 * MIB
FEW_VALUES = bytes(byte & 15 for byte in range(256))


@dataclass(frozen=True, slots=True)
class Stored:
    """A bucket whose chunks lie in frames, and what they hold."""

    s3: Any
    bucket: str
    chunks: dict[str, bytes]

    def get(self, key: str, **asked: Any) -> bytes:
        body: bytes = self.s3.get_object(Bucket=self.bucket, Key=key, **asked)["Body"].read()
        return body

    def source(self, key: str) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": key}


def engine_status(server: RunningServer) -> EngineStatus:
    with StorageClient(server.run_dir / "storage.sock") as client:
        return client.ask(GetEngineStatus(), EngineState).status


def usage_of(server: RunningServer, bucket: str) -> BucketUsage:
    with StorageClient(server.run_dir / "storage.sock") as client:
        (usage,) = client.ask(GetUsage(bucket=bucket), Usage).buckets
    return usage


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Chunks may be moved as soon as they are there."""
    folder = tmp_path_factory.mktemp("encoded")
    with start_server(folder, "storage.compaction_idle_s=0") as running:
        yield running
    close_clients()


@pytest.fixture(params=["put as frames", "encoded where they lay"])
def stored(request: pytest.FixtureRequest, server: RunningServer) -> Iterator[Stored]:
    s3, bucket = s3_client(server), f"encoded-{secrets.token_hex(6)}"
    s3.create_bucket(Bucket=bucket)
    data = secrets.token_bytes(CHUNK_BYTES * len(KEYS)).translate(FEW_VALUES)
    chunks = {
        key: data[begin : begin + CHUNK_BYTES]
        for key, begin in zip(KEYS, range(0, len(data), CHUNK_BYTES), strict=True)
    }
    policy = BucketPolicy(encoding=StoredEncoding.PLANES_ZSTD)
    with StorageClient(server.run_dir / "storage.sock") as client:
        client.ask(SetLayout(bucket=bucket, layout=LAYOUT), Done)
        client.ask(SetPolicy(bucket=bucket, policy=policy), Done)
    if request.param == "put as frames":
        asked = Descriptor(KEYS, LAYOUT.num_layers, 16, SLICE_BYTES, DeliveryMode.CHUNKWISE)
        head = asked.to_bytes()
        body = len(head).to_bytes(4, "big") + head + data
        assert call(server, "POST", f"/{bucket}?kv-put", body).status == 200
    else:
        for key, chunk in chunks.items():
            s3.put_object(Bucket=bucket, Key=key, Body=chunk)
    # The engine's own count has frames that are still being written, too.
    wait_until(
        lambda: usage_of(server, bucket).decoded_bytes == len(data), "all chunks to be encoded"
    )
    yield Stored(s3, bucket, chunks)
    for listed in s3.list_objects_v2(Bucket=bucket).get("Contents", []):
        s3.delete_object(Bucket=bucket, Key=listed["Key"])
    s3.delete_bucket(Bucket=bucket)


@pytest.fixture(scope="module")
def plain(server: RunningServer) -> str:
    """A bucket of no layout or policy."""
    s3_client(server).create_bucket(Bucket="plain")
    return "plain"


def code_of(caught: pytest.ExceptionInfo[ClientError]) -> str:
    error: str = caught.value.response["Error"]["Code"]
    return error


def test_objects_are_got_listed_overwritten_and_deleted(stored: Stored) -> None:
    assert {key: stored.get(key) for key in KEYS} == stored.chunks
    listed = stored.s3.list_objects_v2(Bucket=stored.bucket)["Contents"]
    assert [(each["Key"], each["Size"]) for each in listed] == [(key, CHUNK_BYTES) for key in KEYS]
    head = stored.s3.head_object(Bucket=stored.bucket, Key=KEYS[0])
    assert (head["ContentLength"], head["ETag"]) == (CHUNK_BYTES, listed[0]["ETag"])
    same, other = stored.chunks[KEYS[0]], stored.chunks[KEYS[1]]
    stored.s3.put_object(Bucket=stored.bucket, Key=KEYS[0], Body=same)  # it is known as the same
    with pytest.raises(ClientError) as caught:
        stored.s3.put_object(Bucket=stored.bucket, Key=KEYS[0], Body=other)
    assert code_of(caught) == "ContentConflict"
    stored.s3.delete_object(Bucket=stored.bucket, Key=KEYS[0])
    with pytest.raises(ClientError) as caught:
        stored.get(KEYS[0])
    assert code_of(caught) == "NoSuchKey"
    stored.s3.put_object(Bucket=stored.bucket, Key=KEYS[0], Body=other)
    assert [stored.get(key) for key in KEYS] == [other, other, stored.chunks[KEYS[2]]]


def test_an_operator_is_told_what_a_buckets_frames_take(
    server: RunningServer, stored: Stored
) -> None:
    usage = usage_of(server, stored.bucket)
    assert usage.stored_bytes == usage.decoded_bytes == CHUNK_BYTES * len(KEYS)
    assert 0 < usage.encoded_bytes < usage.decoded_bytes


@pytest.mark.parametrize(
    ("span", "begin", "end"),
    [
        ("0-0", 0, 1),
        ("1000-1999", 1000, 2000),
        (f"{SLICE_BYTES - 3}-{2 * SLICE_BYTES + 4}", SLICE_BYTES - 3, 2 * SLICE_BYTES + 5),
        ("-70000", CHUNK_BYTES - 70_000, CHUNK_BYTES),
        (f"{CHUNK_BYTES - 1}-", CHUNK_BYTES - 1, CHUNK_BYTES),
    ],
)
def test_ranges_are_those_of_the_decoded_bytes(
    stored: Stored, span: str, begin: int, end: int
) -> None:
    answer = stored.s3.get_object(Bucket=stored.bucket, Key=KEYS[1], Range=f"bytes={span}")
    assert answer["Body"].read() == stored.chunks[KEYS[1]][begin:end]
    assert answer["ContentRange"] == f"bytes {begin}-{end - 1}/{CHUNK_BYTES}"
    with pytest.raises(ClientError) as caught:
        stored.get(KEYS[1], Range=f"bytes={CHUNK_BYTES}-")
    assert code_of(caught) == "InvalidRange"


def test_conditions_go_by_the_etag_and_time_of_what_was_put(stored: Stored) -> None:
    head = stored.s3.head_object(Bucket=stored.bucket, Key=KEYS[0])
    etag, modified = head["ETag"], head["LastModified"]
    whole = stored.chunks[KEYS[0]]
    assert stored.get(KEYS[0], IfMatch=etag) == whole
    assert stored.get(KEYS[0], IfNoneMatch='"other"') == whole
    assert stored.get(KEYS[0], IfUnmodifiedSince=modified + timedelta(days=1)) == whole
    for refused, code in (
        ({"IfMatch": '"other"'}, "PreconditionFailed"),
        ({"IfNoneMatch": etag}, "304"),
        ({"IfModifiedSince": modified + timedelta(seconds=1)}, "304"),
    ):
        with pytest.raises(ClientError) as caught:
            stored.get(KEYS[0], **refused)
        assert code_of(caught) == code
    with pytest.raises(ClientError) as caught:
        stored.s3.put_object(Bucket=stored.bucket, Key=KEYS[0], Body=whole, IfNoneMatch="*")
    assert code_of(caught) == "PreconditionFailed"
    assert stored.get(KEYS[0]) == whole


def test_copies_are_made_of_and_beside_what_is_encoded(stored: Stored, plain: str) -> None:
    s3, bucket = stored.s3, stored.bucket
    etag = s3.head_object(Bucket=bucket, Key=KEYS[0])["ETag"]
    s3.copy_object(
        Bucket=plain,
        Key="away",
        CopySource=stored.source(KEYS[0]),
        CopySourceIfMatch=etag,
        MetadataDirective="REPLACE",
        Metadata={"colour": "red"},
    )
    away = s3.get_object(Bucket=plain, Key="away")
    assert (away["Body"].read(), away["ETag"]) == (stored.chunks[KEYS[0]], etag)
    assert away["Metadata"] == {"colour": "red"}
    s3.copy_object(Bucket=bucket, Key="back", CopySource={"Bucket": plain, "Key": "away"})
    assert stored.get("back") == stored.chunks[KEYS[0]]
    with pytest.raises(ClientError) as caught:
        s3.copy_object(
            Bucket=plain, Key="no", CopySource=stored.source(KEYS[0]), CopySourceIfMatch='"other"'
        )
    assert code_of(caught) == "PreconditionFailed"
    tags = {"TagSet": [{"Key": "a", "Value": "b"}]}
    s3.put_object_tagging(Bucket=bucket, Key=KEYS[1], Tagging=tags)
    assert s3.get_object_tagging(Bucket=bucket, Key=KEYS[1])["TagSet"] == tags["TagSet"]
    assert stored.get(KEYS[1]) == stored.chunks[KEYS[1]]


def test_parts_are_copied_out_of_frames(stored: Stored, plain: str) -> None:
    s3, first = stored.s3, secrets.token_bytes(PART_BYTES)
    upload = s3.create_multipart_upload(Bucket=plain, Key="joined")["UploadId"]
    named = {"Bucket": plain, "Key": "joined", "UploadId": upload}
    etags = [s3.upload_part(**named, PartNumber=1, Body=first)["ETag"]]
    copied = s3.upload_part_copy(
        **named,
        PartNumber=2,
        CopySource=stored.source(KEYS[2]),
        CopySourceRange=f"bytes=100-{CHUNK_BYTES - 1}",
    )
    etags.append(copied["CopyPartResult"]["ETag"])
    part = stored.chunks[KEYS[2]][100:]
    assert etags[1].strip('"') == hashlib.md5(part, usedforsecurity=False).hexdigest()
    parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]
    s3.complete_multipart_upload(**named, MultipartUpload={"Parts": parts})
    assert s3.get_object(Bucket=plain, Key="joined")["Body"].read() == first + part


def test_a_chunk_may_come_in_one_part(stored: Stored) -> None:
    s3, data = stored.s3, stored.chunks[KEYS[0]]
    upload = s3.create_multipart_upload(Bucket=stored.bucket, Key="parts")["UploadId"]
    named = {"Bucket": stored.bucket, "Key": "parts", "UploadId": upload}
    etag = s3.upload_part_copy(**named, PartNumber=1, CopySource=stored.source(KEYS[0]))
    parts = [{"PartNumber": 1, "ETag": etag["CopyPartResult"]["ETag"]}]
    s3.complete_multipart_upload(**named, MultipartUpload={"Parts": parts})
    assert stored.get("parts") == data


def test_chunks_outlive_a_kill_as_they_were_put(server: RunningServer, stored: Stored) -> None:
    etags = {key: stored.s3.head_object(Bucket=stored.bucket, Key=key)["ETag"] for key in KEYS}
    server.kill_storage()
    server.restart_storage()
    usage = usage_of(server, stored.bucket)
    assert 0 < usage.encoded_bytes < usage.decoded_bytes == CHUNK_BYTES * len(KEYS)
    status = engine_status(server)
    assert (status.encoded_bytes > 0, status.damaged) == (True, 0)
    for key in KEYS:
        assert stored.get(key) == stored.chunks[key]
        assert stored.s3.head_object(Bucket=stored.bucket, Key=key)["ETag"] == etags[key]
