"""Buckets whose ETags are no MD5, which saves hashing."""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
from typing import Any

import pytest
from botocore.exceptions import ClientError

from objectcache_schemas.messages.buckets import ConfigureBucket
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.records import BucketConfiguration, EtagMode
from tests.servers import RunningServer
from tests.storage_client import StorageClient

PART = bytes(range(256)) * (5 << 12)  # 5 MiB, the smallest part that may be followed
OPAQUE = re.compile(r'"[0-9a-f]{32}-1"')


@pytest.fixture
def opaque_bucket(server: RunningServer, s3: Any) -> str:
    name = f"opaque-{secrets.token_hex(6)}"
    s3.create_bucket(Bucket=name)
    configuration = BucketConfiguration(etag_mode=EtagMode.OPAQUE)
    with StorageClient(server.run_dir / "storage.sock") as storage:
        request = ConfigureBucket(
            name=name, configuration=configuration, replaces=BucketConfiguration()
        )
        storage.ask(request, Done)
    return name


@pytest.mark.parametrize("size_bytes", [0, 5, 300_000])
def test_an_opaque_etag_has_a_dash_and_names_one_put(
    s3: Any, opaque_bucket: str, size_bytes: int
) -> None:
    body = b"x" * size_bytes
    first = s3.put_object(Bucket=opaque_bucket, Key="key", Body=body)["ETag"]
    assert OPAQUE.fullmatch(first)
    assert s3.head_object(Bucket=opaque_bucket, Key="key")["ETag"] == first
    assert s3.get_object(Bucket=opaque_bucket, Key="key", IfMatch=first)["Body"].read() == body
    assert s3.put_object(Bucket=opaque_bucket, Key="key", Body=body)["ETag"] != first


def test_the_etag_of_other_buckets_is_the_md5(s3: Any, bucket: str) -> None:
    stored = s3.put_object(Bucket=bucket, Key="key", Body=b"bytes")
    assert stored["ETag"].strip('"') == hashlib.md5(b"bytes", usedforsecurity=False).hexdigest()


def test_an_md5_that_a_client_sends_is_verified_all_the_same(s3: Any, opaque_bucket: str) -> None:
    wrong = base64.b64encode(hashlib.md5(b"other", usedforsecurity=False).digest()).decode()
    with pytest.raises(ClientError) as caught:
        s3.put_object(Bucket=opaque_bucket, Key="key", Body=b"bytes", ContentMD5=wrong)
    assert caught.value.response["Error"]["Code"] == "BadDigest"
    right = base64.b64encode(hashlib.md5(b"bytes", usedforsecurity=False).digest()).decode()
    stored = s3.put_object(Bucket=opaque_bucket, Key="key", Body=b"bytes", ContentMD5=right)
    assert OPAQUE.fullmatch(stored["ETag"])


def test_parts_and_what_they_make_have_opaque_etags(s3: Any, opaque_bucket: str) -> None:
    named = {"Bucket": opaque_bucket, "Key": "key"}
    upload = {**named, "UploadId": s3.create_multipart_upload(**named)["UploadId"]}
    parts = [
        {
            "PartNumber": number,
            "ETag": s3.upload_part(**upload, PartNumber=number, Body=body)["ETag"],
        }
        for number, body in ((1, PART), (2, b"end"))
    ]
    assert all(OPAQUE.fullmatch(part["ETag"]) for part in parts)
    etag = s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})["ETag"]
    assert etag.endswith('-2"')
    assert s3.get_object(**named)["Body"].read() == PART + b"end"
