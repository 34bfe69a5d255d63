"""boto3 with its default settings against real processes."""

from __future__ import annotations

import io
import secrets
import socket
from collections.abc import Callable
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.s3_clients import presigned_path, s3_client, send
from tests.servers import RunningServer

MIB = 1 << 20
ODD_KEYS = [
    "plain",
    "with space",
    "plus+sign",
    "percent%25literal",
    "model/name@rank@group@hash",
    "ünïcode/日本語/🦀",
    "double//slash",
    "dots/../and/.",
    "trailing/",
    "a%2Fb",
    "quote'\"<&>",
    "question?mark#hash",
    "k" * 1024,
    "new\nline\ttab",
]


@contextmanager
def fails_with(code: str, status: int) -> Any:
    with pytest.raises(ClientError) as caught:
        yield caught
    response = caught.value.response
    assert response["Error"]["Code"] == code
    assert response["ResponseMetadata"]["HTTPStatusCode"] == status


def read(s3: Any, bucket: str, key: str, **more: Any) -> bytes:
    body: bytes = s3.get_object(Bucket=bucket, Key=key, **more)["Body"].read()
    return body


# --- buckets -------------------------------------------------------------------------------------


def test_a_bucket_is_created_listed_and_deleted(s3: Any, bucket: str) -> None:
    assert bucket in [entry["Name"] for entry in s3.list_buckets()["Buckets"]]
    assert s3.head_bucket(Bucket=bucket)["BucketRegion"] == "us-east-1"
    assert s3.get_bucket_location(Bucket=bucket)["LocationConstraint"] is None
    s3.delete_bucket(Bucket=bucket)
    with fails_with("404", 404):
        s3.head_bucket(Bucket=bucket)


def test_creating_an_own_bucket_again_changes_nothing(s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="key", Body=b"bytes")
    s3.create_bucket(Bucket=bucket)
    assert read(s3, bucket, "key") == b"bytes"


def test_a_bucket_that_holds_an_object_is_not_deleted(s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"1")
    with fails_with("BucketNotEmpty", 409):
        s3.delete_bucket(Bucket=bucket)
    assert read(s3, bucket, "k") == b"1"


def test_a_location_constraint_must_be_the_servers_region(s3: Any) -> None:
    name = f"test-{secrets.token_hex(6)}"
    with fails_with("IllegalLocationConstraintException", 400):
        s3.create_bucket(
            Bucket=name, CreateBucketConfiguration={"LocationConstraint": "eu-central-1"}
        )


def test_what_clients_ask_about_a_bucket_has_s3s_answers(s3: Any, bucket: str) -> None:
    assert "Status" not in s3.get_bucket_versioning(Bucket=bucket)
    grants = s3.get_bucket_acl(Bucket=bucket)["Grants"]
    assert [grant["Permission"] for grant in grants] == ["FULL_CONTROL"]
    assert s3.get_bucket_request_payment(Bucket=bucket)["Payer"] == "BucketOwner"


@pytest.mark.parametrize(
    ("method", "code"),
    [
        ("get_bucket_policy", "NoSuchBucketPolicy"),
        ("get_bucket_cors", "NoSuchCORSConfiguration"),
        ("get_bucket_lifecycle_configuration", "NoSuchLifecycleConfiguration"),
        ("get_bucket_tagging", "NoSuchTagSet"),
        ("get_bucket_encryption", "ServerSideEncryptionConfigurationNotFoundError"),
        ("get_object_lock_configuration", "ObjectLockConfigurationNotFoundError"),
        ("get_bucket_website", "NoSuchWebsiteConfiguration"),
    ],
)
def test_a_configuration_that_no_bucket_has_is_s3s_404(
    s3: Any, bucket: str, method: str, code: str
) -> None:
    with fails_with(code, 404):
        getattr(s3, method)(Bucket=bucket)


# --- objects -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size_bytes", [0, 1, 65_536, 65_537, 3 * MIB + 7])
def test_an_object_reads_as_it_was_put(s3: Any, bucket: str, size_bytes: int) -> None:
    body = secrets.token_bytes(size_bytes)
    put = s3.put_object(Bucket=bucket, Key="k", Body=body)
    got = s3.get_object(Bucket=bucket, Key="k")
    assert got["Body"].read() == body
    assert got["ContentLength"] == size_bytes
    assert got["ETag"] == put["ETag"]
    assert got["ChecksumCRC32"] == put["ChecksumCRC32"]
    head = s3.head_object(Bucket=bucket, Key="k")
    assert head["ContentLength"] == size_bytes
    assert "ChecksumCRC32" not in head


@pytest.mark.parametrize("key", ODD_KEYS)
def test_an_odd_key_names_its_object_and_no_other(s3: Any, bucket: str, key: str) -> None:
    s3.put_object(Bucket=bucket, Key=key, Body=key.encode())
    assert read(s3, bucket, key) == key.encode()
    listed = s3.list_objects_v2(Bucket=bucket)["Contents"]
    assert [entry["Key"] for entry in listed] == [key]
    s3.delete_object(Bucket=bucket, Key=key)
    with fails_with("NoSuchKey", 404):
        s3.get_object(Bucket=bucket, Key=key)


def test_metadata_and_content_headers_come_back(s3: Any, bucket: str) -> None:
    given = {
        "ContentType": "application/x-kv",
        "ContentEncoding": "zstd",
        "ContentDisposition": 'attachment; filename="a.bin"',
        "ContentLanguage": "en",
        "CacheControl": "no-store",
        "Metadata": {"model": "llama", "rank": "0"},
    }
    s3.put_object(Bucket=bucket, Key="k", Body=b"1", **given)
    got = s3.get_object(Bucket=bucket, Key="k")
    assert got["Body"].read() == b"1"
    for answer in (got, s3.head_object(Bucket=bucket, Key="k")):
        assert {name: answer[name] for name in given} == given


def test_response_parameters_override_headers(s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"1", ContentType="text/a")
    got = s3.get_object(Bucket=bucket, Key="k", ResponseContentType="text/b")
    assert got["Body"].read() == b"1"
    assert got["ContentType"] == "text/b"


def test_metadata_over_two_kib_is_refused(s3: Any, bucket: str) -> None:
    with fails_with("MetadataTooLarge", 400):
        s3.put_object(Bucket=bucket, Key="k", Body=b"1", Metadata={"m": "x" * 2048})


def test_a_missing_key_is_a_404_for_get_and_head(s3: Any, bucket: str) -> None:
    with fails_with("NoSuchKey", 404):
        s3.get_object(Bucket=bucket, Key="absent")
    with fails_with("404", 404):
        s3.head_object(Bucket=bucket, Key="absent")
    with fails_with("NoSuchBucket", 404):
        s3.get_object(Bucket=f"{bucket}-absent", Key="absent")


@pytest.mark.parametrize(
    ("range_header", "first", "end"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=10-99", 10, 100),
        ("bytes=200000-", 200_000, 300_000),
        ("bytes=-7", 299_993, 300_000),
        ("bytes=299990-999999", 299_990, 300_000),
        ("bytes=5-200004", 5, 200_005),
    ],
)
def test_a_range_is_that_part_and_carries_no_whole_checksum(
    s3: Any, bucket: str, range_header: str, first: int, end: int
) -> None:
    body = secrets.token_bytes(300_000)
    s3.put_object(Bucket=bucket, Key="k", Body=body)
    got = s3.get_object(Bucket=bucket, Key="k", Range=range_header)
    assert got["Body"].read() == body[first:end]
    assert got["ContentRange"] == f"bytes {first}-{end - 1}/300000"
    assert got["ResponseMetadata"]["HTTPStatusCode"] == 206
    assert "ChecksumCRC32" not in got
    head = s3.head_object(Bucket=bucket, Key="k", Range=range_header)
    assert head["ContentLength"] == end - first


def test_a_range_outside_is_refused_with_the_objects_size(s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"abc")
    with fails_with("InvalidRange", 416) as caught:
        s3.get_object(Bucket=bucket, Key="k", Range="bytes=3-")
    headers = caught.value.response["ResponseMetadata"]["HTTPHeaders"]
    assert headers["content-range"] == "bytes */3"


def test_an_empty_object_has_no_range_but_a_first_part(s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"")
    with fails_with("InvalidRange", 416):
        s3.get_object(Bucket=bucket, Key="k", Range="bytes=0-8388607")
    assert read(s3, bucket, "k", PartNumber=1) == b""


def test_conditions_decide_what_a_read_answers(s3: Any, bucket: str) -> None:
    etag = s3.put_object(Bucket=bucket, Key="k", Body=b"abc")["ETag"]
    assert read(s3, bucket, "k", IfMatch=etag) == b"abc"
    with fails_with("PreconditionFailed", 412):
        s3.get_object(Bucket=bucket, Key="k", IfMatch='"0"')
    with fails_with("304", 304) as caught:
        s3.get_object(Bucket=bucket, Key="k", IfNoneMatch=etag)
    assert caught.value.response["ResponseMetadata"]["HTTPHeaders"]["etag"] == etag


def test_if_none_match_star_makes_a_put_write_once(s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"first", IfNoneMatch="*")
    with fails_with("PreconditionFailed", 412):
        s3.put_object(Bucket=bucket, Key="k", Body=b"second", IfNoneMatch="*")
    assert read(s3, bucket, "k") == b"first"


def test_if_none_match_with_an_etag_keeps_that_object(s3: Any, bucket: str) -> None:
    etag = s3.put_object(Bucket=bucket, Key="k", Body=b"first")["ETag"]
    with fails_with("PreconditionFailed", 412):
        s3.put_object(Bucket=bucket, Key="k", Body=b"second", IfNoneMatch=etag)
    assert read(s3, bucket, "k") == b"first"
    s3.put_object(Bucket=bucket, Key="k", Body=b"third", IfNoneMatch='"another"')
    assert read(s3, bucket, "k") == b"third"


def test_if_match_makes_a_put_replace_only_what_was_seen(s3: Any, bucket: str) -> None:
    etag = s3.put_object(Bucket=bucket, Key="k", Body=b"first")["ETag"]
    s3.put_object(Bucket=bucket, Key="k", Body=b"second", IfMatch=etag)
    with fails_with("PreconditionFailed", 412):
        s3.put_object(Bucket=bucket, Key="k", Body=b"third", IfMatch=etag)
    assert read(s3, bucket, "k") == b"second"


def test_deleting_many_reports_each_key(s3: Any, bucket: str) -> None:
    keys = ["a", "b/ü", "c&d", "never-stored"]
    for key in keys[:3]:
        s3.put_object(Bucket=bucket, Key=key, Body=b"1")
    request: dict[str, Any] = {"Objects": [{"Key": key} for key in keys]}
    request["Objects"].append({"Key": "a", "VersionId": "7"})
    answer = s3.delete_objects(Bucket=bucket, Delete=request)
    assert [entry["Key"] for entry in answer["Deleted"]] == keys
    assert [(entry["Key"], entry["Code"]) for entry in answer["Errors"]] == [
        ("a", "InvalidArgument")
    ]
    assert "Contents" not in s3.list_objects_v2(Bucket=bucket)


def test_deleting_many_quietly_reports_only_errors(s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="a", Body=b"1")
    answer = s3.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": "a"}], "Quiet": True})
    assert "Deleted" not in answer
    assert "Errors" not in answer


def test_a_copy_keeps_bytes_and_metadata_or_replaces_the_metadata(s3: Any, bucket: str) -> None:
    body = secrets.token_bytes(100_000)
    s3.put_object(Bucket=bucket, Key="söurce +%", Body=body, Metadata={"a": "1"})
    source = {"Bucket": bucket, "Key": "söurce +%"}
    s3.copy_object(Bucket=bucket, Key="kept", CopySource=source)
    s3.copy_object(
        Bucket=bucket,
        Key="replaced",
        CopySource=source,
        MetadataDirective="REPLACE",
        Metadata={"b": "2"},
    )
    kept, replaced = (s3.get_object(Bucket=bucket, Key=key) for key in ("kept", "replaced"))
    assert kept["Body"].read() == replaced["Body"].read() == body
    assert (kept["Metadata"], replaced["Metadata"]) == ({"a": "1"}, {"b": "2"})


def test_a_copy_onto_itself_needs_replace(s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"1")
    source = {"Bucket": bucket, "Key": "k"}
    with fails_with("InvalidRequest", 400):
        s3.copy_object(Bucket=bucket, Key="k", CopySource=source)
    s3.copy_object(
        Bucket=bucket, Key="k", CopySource=source, MetadataDirective="REPLACE", Metadata={"n": "1"}
    )
    assert s3.head_object(Bucket=bucket, Key="k")["Metadata"] == {"n": "1"}


def test_conditions_on_the_source_of_a_copy_are_kept(s3: Any, bucket: str) -> None:
    etag = s3.put_object(Bucket=bucket, Key="k", Body=b"1")["ETag"]
    source = {"Bucket": bucket, "Key": "k"}
    with fails_with("PreconditionFailed", 412):
        s3.copy_object(Bucket=bucket, Key="c", CopySource=source, CopySourceIfMatch='"0"')
    s3.copy_object(Bucket=bucket, Key="c", CopySource=source, CopySourceIfMatch=etag)
    with fails_with("PreconditionFailed", 412):
        s3.copy_object(Bucket=bucket, Key="c", CopySource=source, CopySourceIfNoneMatch=etag)


@pytest.mark.parametrize(
    "parameters",
    [
        {"ServerSideEncryption": "AES256"},
        {"ServerSideEncryption": "aws:kms"},
        {"ACL": "public-read"},
        {"ObjectLockLegalHoldStatus": "ON"},
        {"WebsiteRedirectLocation": "/x"},
        {"GrantRead": "id=1"},
    ],
)
def test_what_is_not_done_is_refused_and_stores_nothing(
    s3: Any, bucket: str, parameters: dict[str, str]
) -> None:
    with fails_with("NotImplemented", 501):
        s3.put_object(Bucket=bucket, Key="k", Body=b"1", **parameters)
    assert "Contents" not in s3.list_objects_v2(Bucket=bucket)


def test_another_storage_class_is_refused_and_private_is_accepted(s3: Any, bucket: str) -> None:
    with fails_with("InvalidStorageClass", 400):
        s3.put_object(Bucket=bucket, Key="k", Body=b"1", StorageClass="GLACIER")
    s3.put_object(Bucket=bucket, Key="k", Body=b"1", StorageClass="STANDARD", ACL="private")


@pytest.mark.parametrize(
    "request_of",
    [
        lambda s3, bucket: s3.put_object_legal_hold(
            Bucket=bucket, Key="k", LegalHold={"Status": "ON"}
        ),
        lambda s3, bucket: s3.put_bucket_versioning(
            Bucket=bucket, VersioningConfiguration={"Status": "Enabled"}
        ),
        lambda s3, bucket: s3.put_bucket_policy(Bucket=bucket, Policy="{}"),
        lambda s3, bucket: s3.get_object_torrent(Bucket=bucket, Key="k"),
        lambda s3, bucket: s3.restore_object(Bucket=bucket, Key="k", RestoreRequest={"Days": 1}),
    ],
)
def test_an_operation_that_is_not_served_is_a_501_and_changes_nothing(
    s3: Any, bucket: str, request_of: Callable[[Any, str], Any]
) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"kept")
    with fails_with("NotImplemented", 501):
        request_of(s3, bucket)
    assert read(s3, bucket, "k") == b"kept"


def test_another_expected_owner_is_denied(s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"1", ExpectedBucketOwner="root")
    with fails_with("AccessDenied", 403):
        s3.put_object(Bucket=bucket, Key="k", Body=b"2", ExpectedBucketOwner="someone")
    assert read(s3, bucket, "k") == b"1"


@pytest.mark.parametrize("algorithm", ["CRC32", "CRC32C", "CRC64NVME", "SHA1", "SHA256"])
def test_every_checksum_is_verified_and_echoed(s3: Any, bucket: str, algorithm: str) -> None:
    put = s3.put_object(Bucket=bucket, Key="k", Body=b"abc", ChecksumAlgorithm=algorithm)
    name = f"Checksum{algorithm}"
    got = s3.get_object(Bucket=bucket, Key="k", ChecksumMode="ENABLED")
    assert got["Body"].read() == b"abc"
    assert put[name] == got[name]
    with fails_with("BadDigest", 400):
        s3.put_object(Bucket=bucket, Key="k", Body=b"abd", **{name: put[name]})
    assert read(s3, bucket, "k") == b"abc"


def test_a_stream_of_unknown_length_is_stored(s3: Any, bucket: str) -> None:
    body = secrets.token_bytes(MIB + 1)
    s3.upload_fileobj(io.BytesIO(body), bucket, "k")
    assert read(s3, bucket, "k") == body


# --- listings ------------------------------------------------------------------------------------


def model_listing(keys: list[str], prefix: str, delimiter: str) -> tuple[list[str], list[str]]:
    """Keys and common prefixes that a complete listing shows."""
    objects: list[str] = []
    prefixes: list[str] = []
    for key in sorted(keys, key=str.encode):
        if not key.startswith(prefix):
            continue
        rest = key[len(prefix) :]
        if delimiter and delimiter in rest:
            common = prefix + rest[: rest.index(delimiter) + len(delimiter)]
            if common not in prefixes:
                prefixes.append(common)
        else:
            objects.append(key)
    return objects, prefixes


LISTED_KEYS = [
    "a",
    "a/1",
    "a/2",
    "a/b/3",
    "ab",
    "b/1",
    "b//2",
    "c d/+",
    "é/x",
    "z",
    "🦀/y",
]


@pytest.fixture(scope="module")
def listed_bucket(server: RunningServer) -> str:
    """A bucket that tests list and leave as it is."""
    client, name = s3_client(server), f"listed-{secrets.token_hex(6)}"
    client.create_bucket(Bucket=name)
    for key in LISTED_KEYS:
        client.put_object(Bucket=name, Key=key, Body=b"1")
    return name


@pytest.fixture(scope="module")
def lister(server: RunningServer) -> Any:
    """One client for all listings, as to make one takes longer than to list."""
    return s3_client(server)


@pytest.mark.parametrize("prefix", ["", "a", "a/", "b/", "é", "nothing"])
@pytest.mark.parametrize("delimiter", ["", "/", "b"])
@pytest.mark.parametrize("page_size", [1, 3, 1000])
@pytest.mark.parametrize("operation", ["list_objects", "list_objects_v2", "list_object_versions"])
def test_pages_of_every_listing_add_up_to_the_model(
    lister: Any, listed_bucket: str, prefix: str, delimiter: str, page_size: int, operation: str
) -> None:
    objects: list[str] = []
    prefixes: list[str] = []
    pages = lister.get_paginator(operation).paginate(
        Bucket=listed_bucket,
        Prefix=prefix,
        Delimiter=delimiter,
        PaginationConfig={"PageSize": page_size},
    )
    for page in pages:
        found = page.get("Versions" if operation == "list_object_versions" else "Contents", [])
        shared = page.get("CommonPrefixes", [])
        assert len(found) + len(shared) <= page_size
        objects += [entry["Key"] for entry in found]
        prefixes += [entry["Prefix"] for entry in shared]
    assert (objects, prefixes) == model_listing(LISTED_KEYS, prefix, delimiter)


def test_a_listing_starts_after_a_key_and_names_owners_when_asked(
    s3: Any, listed_bucket: str
) -> None:
    page = s3.list_objects_v2(Bucket=listed_bucket, StartAfter="b/1", FetchOwner=True, MaxKeys=2)
    assert [entry["Key"] for entry in page["Contents"]] == ["c d/+", "z"]
    assert {entry["Owner"]["ID"] for entry in page["Contents"]} == {"root"}
    assert page["IsTruncated"]


def test_a_listing_of_no_keys_is_empty_and_complete(s3: Any, listed_bucket: str) -> None:
    page = s3.list_objects_v2(Bucket=listed_bucket, MaxKeys=0)
    assert page["KeyCount"] == 0
    assert not page["IsTruncated"]


def test_a_foreign_continuation_token_is_refused(s3: Any, bucket: str) -> None:
    with fails_with("InvalidArgument", 400):
        s3.list_objects_v2(Bucket=bucket, ContinuationToken="!")


# --- multipart -----------------------------------------------------------------------------------


def test_a_large_file_goes_up_in_parts_and_comes_back_whole(s3: Any, bucket: str) -> None:
    body = secrets.token_bytes(8 * MIB) + secrets.token_bytes(8 * MIB) + b"tail"
    s3.upload_fileobj(io.BytesIO(body), bucket, "k", ExtraArgs={"Metadata": {"m": "1"}})
    sink = io.BytesIO()
    s3.download_fileobj(bucket, "k", sink)
    assert sink.getvalue() == body
    head = s3.head_object(Bucket=bucket, Key="k", PartNumber=3)
    assert (head["ContentLength"], head["PartsCount"]) == (4, 3)
    assert head["ETag"].endswith('-3"')
    assert head["Metadata"] == {"m": "1"}
    assert read(s3, bucket, "k", PartNumber=3) == b"tail"
    with fails_with("InvalidPart", 400):
        s3.get_object(Bucket=bucket, Key="k", PartNumber=4)


def start_upload(s3: Any, bucket: str, key: str) -> str:
    upload_id: str = s3.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
    return upload_id


def test_uploads_and_parts_are_listed_and_an_abort_forgets_them(s3: Any, bucket: str) -> None:
    upload_id = start_upload(s3, bucket, "a ü")
    named = {"Bucket": bucket, "Key": "a ü", "UploadId": upload_id}
    for number in (1, 2, 5):
        s3.upload_part(**named, PartNumber=number, Body=b"x" * number)
    uploads = s3.list_multipart_uploads(Bucket=bucket)["Uploads"]
    assert [(entry["Key"], entry["UploadId"]) for entry in uploads] == [("a ü", upload_id)]
    pages = s3.get_paginator("list_parts").paginate(**named, PaginationConfig={"PageSize": 2})
    parts = [part for page in pages for part in page["Parts"]]
    assert [(part["PartNumber"], part["Size"]) for part in parts] == [(1, 1), (2, 2), (5, 5)]
    s3.abort_multipart_upload(**named)
    with fails_with("NoSuchUpload", 404):
        s3.list_parts(**named)
    assert "Contents" not in s3.list_objects_v2(Bucket=bucket)


def test_a_completion_is_checked_part_by_part(s3: Any, bucket: str) -> None:
    named = {"Bucket": bucket, "Key": "k", "UploadId": start_upload(s3, bucket, "k")}
    first = s3.upload_part(**named, PartNumber=1, Body=b"a" * 5 * MIB)
    second = s3.upload_part(**named, PartNumber=2, Body=b"b")
    parts = [
        {"PartNumber": 1, "ETag": first["ETag"], "ChecksumCRC32": first["ChecksumCRC32"]},
        {"PartNumber": 2, "ETag": second["ETag"]},
    ]
    wrong = [
        ([parts[1], parts[0]], "InvalidPartOrder"),
        ([parts[0], {**parts[1], "ETag": first["ETag"]}], "InvalidPart"),
        ([parts[0], {**parts[1], "PartNumber": 3}], "InvalidPart"),
        ([{**parts[0], "ChecksumCRC32": "AAAAAA=="}, parts[1]], "InvalidPart"),
    ]
    for listed, code in wrong:
        with fails_with(code, 400):
            s3.complete_multipart_upload(**named, MultipartUpload={"Parts": listed})
    with fails_with("InvalidRequest", 400):
        s3.complete_multipart_upload(
            **named, MultipartUpload={"Parts": parts}, MpuObjectSize=5 * MIB
        )
    s3.complete_multipart_upload(
        **named, MultipartUpload={"Parts": parts}, MpuObjectSize=5 * MIB + 1
    )
    assert read(s3, bucket, "k", Range="bytes=5242879-") == b"ab"
    again = s3.complete_multipart_upload(**named, MultipartUpload={"Parts": parts})
    assert again["Key"] == "k"


def test_parts_are_copied_from_ranges_of_objects(s3: Any, bucket: str) -> None:
    body = secrets.token_bytes(6 * MIB)
    s3.put_object(Bucket=bucket, Key="source %25", Body=body)
    named = {"Bucket": bucket, "Key": "k", "UploadId": start_upload(s3, bucket, "k")}
    source = {"Bucket": bucket, "Key": "source %25"}
    parts = []
    for number, part_range in ((1, f"bytes=0-{5 * MIB - 1}"), (2, "bytes=1-3")):
        copied = s3.upload_part_copy(
            **named, PartNumber=number, CopySource=source, CopySourceRange=part_range
        )
        parts.append({"PartNumber": number, "ETag": copied["CopyPartResult"]["ETag"]})
    s3.complete_multipart_upload(**named, MultipartUpload={"Parts": parts})
    assert read(s3, bucket, "k") == body[: 5 * MIB] + body[1:4]


# --- who asks ------------------------------------------------------------------------------------


def test_a_wrong_secret_and_an_unknown_key_are_denied(server: RunningServer) -> None:
    for given, code in (
        ({"secret_key": "not-the-secret-at-all"}, "SignatureDoesNotMatch"),
        ({"access_key": "AKIDNOTKNOWN"}, "InvalidAccessKeyId"),
    ):
        client = s3_client(server, **given)
        with fails_with(code, 403):
            client.list_buckets()
        client.close()


def test_a_presigned_url_works_again_and_again_until_it_expires(
    server: RunningServer, s3: Any, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.put_object(Bucket=bucket, Key="k ü", Body=b"abc")
    path = presigned_path(s3, "get_object", {"Bucket": bucket, "Key": "k ü"}, ExpiresIn=60)
    for _ in range(2):
        answer = send(server, "GET", path)
        assert (answer.status, answer.body) == (200, b"abc")
    assert send(server, "GET", path.replace("k%20", "j%20")).code == "SignatureDoesNotMatch"
    assert send(server, "PUT", path, b"x").code == "SignatureDoesNotMatch"
    for signer in ("botocore.auth", "botocore.crt.auth"):
        monkeypatch.setattr(f"{signer}.get_current_datetime", two_minutes_ago)
    expired = presigned_path(s3, "get_object", {"Bucket": bucket, "Key": "k ü"}, ExpiresIn=60)
    answer = send(server, "GET", expired)
    assert (answer.status, answer.code) == (403, "AccessDenied")


def two_minutes_ago(remove_tzinfo: bool = True) -> datetime:
    """The time, as botocore's signers ask for it."""
    earlier = datetime.now(UTC) - timedelta(minutes=2)
    return earlier.replace(tzinfo=None) if remove_tzinfo else earlier


def test_a_presigned_put_stores_its_body(server: RunningServer, s3: Any, bucket: str) -> None:
    path = presigned_path(s3, "put_object", {"Bucket": bucket, "Key": "k"}, ExpiresIn=60)
    assert send(server, "PUT", path, b"presigned").status == 200
    assert read(s3, bucket, "k") == b"presigned"


def test_virtual_host_style_names_the_bucket_in_the_host(
    server: RunningServer, s3: Any, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = socket.getaddrinfo

    def to_loopback(host: str, *rest: Any, **more: Any) -> Any:
        return resolve("127.0.0.1" if host.endswith(".localhost") else host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", to_loopback)
    client = s3_client(
        server, addressing_style="virtual", endpoint=f"http://s3.localhost:{server.port}"
    )
    # The configured domain is localhost, so the whole of "<bucket>.s3" would be the bucket's name.
    with fails_with("NoSuchBucket", 404):
        client.put_object(Bucket=bucket, Key="k", Body=b"1")
    client.close()
    client = s3_client(
        server, addressing_style="virtual", endpoint=f"http://localhost:{server.port}"
    )
    client.put_object(Bucket=bucket, Key="dir/k ü", Body=b"virtual")
    assert read(client, bucket, "dir/k ü") == b"virtual"
    assert [entry["Key"] for entry in client.list_objects_v2(Bucket=bucket)["Contents"]] == [
        "dir/k ü"
    ]
    client.close()
    assert read(s3, bucket, "dir/k ü") == b"virtual"
