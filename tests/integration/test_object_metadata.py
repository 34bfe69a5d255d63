"""What S3 keeps beside bytes, with boto3: tags, parts, checksums, lifecycle rules."""

from __future__ import annotations

import base64
import hashlib
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from objectcache_schemas.limits import MIB
from tests.s3_clients import call, s3_client
from tests.servers import RunningServer, start_server

PART_BYTES = 5 * MIB
BOUND_S = 60.0


def code_of(error: pytest.ExceptionInfo[ClientError]) -> tuple[int, str]:
    response: Any = error.value.response
    return response["ResponseMetadata"]["HTTPStatusCode"], response["Error"]["Code"]


def tag_set(tags: dict[str, str]) -> dict[str, list[dict[str, str]]]:
    return {"TagSet": [{"Key": key, "Value": value} for key, value in tags.items()]}


def object_tags(s3: Any, bucket: str, key: str) -> dict[str, str]:
    tags = s3.get_object_tagging(Bucket=bucket, Key=key)["TagSet"]
    return {tag["Key"]: tag["Value"] for tag in tags}


# --- tags ----------------------------------------------------------------------------------------


def test_an_objects_tags_are_replaced_and_deleted_and_leave_the_object(
    s3: Any, bucket: str
) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"data", Tagging="b=2&a=1", ContentType="text/x")
    before = s3.head_object(Bucket=bucket, Key="k")
    assert before["ResponseMetadata"]["HTTPHeaders"]["x-amz-tagging-count"] == "2"
    assert object_tags(s3, bucket, "k") == {"a": "1", "b": "2"}
    s3.put_object_tagging(Bucket=bucket, Key="k", Tagging=tag_set({"c": ""}))
    assert object_tags(s3, bucket, "k") == {"c": ""}
    after = s3.get_object(Bucket=bucket, Key="k")
    assert after["Body"].read() == b"data"
    assert (after["ETag"], after["LastModified"]) == (before["ETag"], before["LastModified"])
    assert (after["ContentType"], after["TagCount"]) == ("text/x", 1)
    s3.delete_object_tagging(Bucket=bucket, Key="k")
    assert object_tags(s3, bucket, "k") == {}
    untagged = s3.get_object(Bucket=bucket, Key="k")
    assert untagged["Body"].read() == b"data"
    assert "TagCount" not in untagged


def test_tags_over_a_limit_change_nothing(s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"data", Tagging="a=1")
    for tags in ({str(number): "" for number in range(11)}, {"k" * 129: ""}, {"k": "v" * 257}):
        with pytest.raises(ClientError) as caught:
            s3.put_object_tagging(Bucket=bucket, Key="k", Tagging=tag_set(tags))
        assert code_of(caught) == (400, "InvalidTag")
    with pytest.raises(ClientError) as caught:
        s3.put_object(Bucket=bucket, Key="k", Body=b"other", Tagging="a=1&a=2")
    assert code_of(caught) == (400, "InvalidTag")
    with pytest.raises(ClientError) as caught:
        s3.put_object_tagging(Bucket=bucket, Key="none", Tagging=tag_set({}))
    assert code_of(caught) == (404, "NoSuchKey")
    assert object_tags(s3, bucket, "k") == {"a": "1"}
    assert s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b"data"


def test_a_copy_takes_the_sources_tags_or_its_own(s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"data", Tagging="a=1")
    source = {"Bucket": bucket, "Key": "k"}
    s3.copy_object(Bucket=bucket, Key="same", CopySource=source, MetadataDirective="REPLACE")
    assert object_tags(s3, bucket, "same") == {"a": "1"}
    s3.copy_object(
        Bucket=bucket, Key="own", CopySource=source, TaggingDirective="REPLACE", Tagging="b=2"
    )
    assert object_tags(s3, bucket, "own") == {"b": "2"}


def test_a_buckets_tags_are_kept_apart_from_its_rules(s3: Any, bucket: str) -> None:
    rules = [{"ID": "r", "Filter": {"Prefix": "a"}, "Status": "Enabled", "Expiration": {"Days": 1}}]
    s3.put_bucket_tagging(Bucket=bucket, Tagging=tag_set({"team": "x", "a": "b"}))
    s3.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration={"Rules": rules})
    tags = s3.get_bucket_tagging(Bucket=bucket)["TagSet"]
    assert tags == [{"Key": "a", "Value": "b"}, {"Key": "team", "Value": "x"}]
    s3.delete_bucket_tagging(Bucket=bucket)
    with pytest.raises(ClientError) as caught:
        s3.get_bucket_tagging(Bucket=bucket)
    assert code_of(caught) == (404, "NoSuchTagSet")
    assert s3.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"] == rules


def test_changes_of_a_buckets_configuration_at_once_are_all_kept(
    server: RunningServer, bucket: str
) -> None:
    clients = [s3_client(server) for _ in range(2)]
    rules = [{"ID": "r", "Prefix": "", "Status": "Enabled", "Expiration": {"Days": 1}}]
    changes = [
        lambda: clients[0].put_bucket_tagging(Bucket=bucket, Tagging=tag_set({"a": "1"})),
        lambda: clients[1].put_bucket_lifecycle_configuration(
            Bucket=bucket, LifecycleConfiguration={"Rules": rules}
        ),
    ]
    for _ in range(5):
        clients[0].delete_bucket_tagging(Bucket=bucket)
        clients[0].delete_bucket_lifecycle(Bucket=bucket)
        threads = [threading.Thread(target=change) for change in changes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(BOUND_S)
        assert clients[0].get_bucket_tagging(Bucket=bucket)["TagSet"]
        assert clients[0].get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"] == rules
    for client in clients:
        client.close()


# --- multipart uploads ---------------------------------------------------------------------------


def upload(
    s3: Any, bucket: str, key: str, pieces: list[bytes], **created: str
) -> tuple[str, list[dict[str, Any]]]:
    """An upload with its parts, not completed."""
    upload_id = s3.create_multipart_upload(Bucket=bucket, Key=key, **created)["UploadId"]
    parts: list[dict[str, Any]] = []
    for number, piece in enumerate(pieces, 1):
        answer = s3.upload_part(
            Bucket=bucket,
            Key=key,
            UploadId=upload_id,
            PartNumber=number,
            Body=piece,
            **({"ChecksumAlgorithm": created["ChecksumAlgorithm"]} if created else {}),
        )
        named = {name: text for name, text in answer.items() if name.startswith("Checksum")}
        named.pop("ChecksumType", None)
        parts.append({"PartNumber": number, "ETag": answer["ETag"], **named})
    return upload_id, parts


def complete(s3: Any, bucket: str, key: str, upload_id: str, parts: Any, **more: Any) -> Any:
    return s3.complete_multipart_upload(
        Bucket=bucket, Key=key, UploadId=upload_id, MultipartUpload={"Parts": parts}, **more
    )


PIECES = [b"a" * PART_BYTES, b"b" * (PART_BYTES + MIB), b"the end"]
WHOLE = b"".join(PIECES)


@pytest.fixture(scope="module")
def composed(server: RunningServer) -> Any:
    """A bucket with one object of three parts and composite SHA-256, and a client."""
    s3 = s3_client(server)
    s3.create_bucket(Bucket="composed")
    upload_id, parts = upload(
        s3, "composed", "k", PIECES, ChecksumAlgorithm="SHA256", ChecksumType="COMPOSITE"
    )
    first = complete(s3, "composed", "k", upload_id, parts, MpuObjectSize=len(WHOLE))
    again = complete(s3, "composed", "k", upload_id, parts)
    assert first["ChecksumSHA256"] == again["ChecksumSHA256"]
    assert first["ETag"] == again["ETag"]
    yield s3
    s3.close()


def test_a_composite_checksum_is_over_the_parts_and_shown_when_asked(composed: Any) -> None:
    digests = [hashlib.sha256(piece).digest() for piece in PIECES]
    of_all = base64.b64encode(hashlib.sha256(b"".join(digests)).digest()).decode()
    head = composed.head_object(Bucket="composed", Key="k", ChecksumMode="ENABLED")
    assert (head["ChecksumSHA256"], head["ChecksumType"]) == (f"{of_all}-3", "COMPOSITE")
    assert "ChecksumSHA256" not in composed.head_object(Bucket="composed", Key="k")
    assert composed.get_object(Bucket="composed", Key="k")["Body"].read() == WHOLE


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_part_is_read_by_its_number_with_its_checksum(composed: Any, number: int) -> None:
    part = composed.get_object(Bucket="composed", Key="k", PartNumber=number)
    begin = sum(map(len, PIECES[: number - 1]))
    end = begin + len(PIECES[number - 1]) - 1
    assert part["ResponseMetadata"]["HTTPStatusCode"] == 206
    assert part["ContentRange"] == f"bytes {begin}-{end}/{len(WHOLE)}"
    assert part["PartsCount"] == 3
    digest = hashlib.sha256(PIECES[number - 1]).digest()
    assert part["ChecksumSHA256"] == base64.b64encode(digest).decode()
    assert part["Body"].read() == PIECES[number - 1]
    ranged = composed.get_object(Bucket="composed", Key="k", Range="bytes=0-9")
    assert ranged["Body"].read() == WHOLE[:10]
    assert "ChecksumSHA256" not in ranged


def test_attributes_show_parts_in_pages(composed: Any) -> None:
    names = ["ETag", "Checksum", "ObjectParts", "StorageClass", "ObjectSize"]
    page = composed.get_object_attributes(
        Bucket="composed", Key="k", ObjectAttributes=names, MaxParts=2
    )
    parts = page["ObjectParts"]
    assert page["ObjectSize"] == len(WHOLE)
    assert page["StorageClass"] == "STANDARD"
    assert page["Checksum"]["ChecksumType"] == "COMPOSITE"
    assert (parts["TotalPartsCount"], parts["NextPartNumberMarker"]) == (3, 2)
    assert parts["IsTruncated"] is True
    assert [part["Size"] for part in parts["Parts"]] == [len(piece) for piece in PIECES[:2]]
    rest = composed.get_object_attributes(
        Bucket="composed", Key="k", ObjectAttributes=["ObjectParts"], PartNumberMarker=2
    )
    assert "ETag" not in rest
    assert rest["ObjectParts"]["IsTruncated"] is False
    (last,) = rest["ObjectParts"]["Parts"]
    digest = hashlib.sha256(PIECES[2]).digest()
    assert (last["PartNumber"], last["Size"]) == (3, len(PIECES[2]))
    assert last["ChecksumSHA256"] == base64.b64encode(digest).decode()


def test_attributes_of_an_object_that_was_put_whole_have_no_parts(s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"data", ChecksumAlgorithm="CRC32")
    names = ["ETag", "Checksum", "ObjectParts", "ObjectSize"]
    found = s3.get_object_attributes(Bucket=bucket, Key="k", ObjectAttributes=names)
    crc = base64.b64encode(zlib.crc32(b"data").to_bytes(4, "big")).decode()
    assert found["ETag"] == hashlib.md5(b"data", usedforsecurity=False).hexdigest()
    assert found["Checksum"] == {"ChecksumCRC32": crc, "ChecksumType": "FULL_OBJECT"}
    assert "ObjectParts" not in found
    with pytest.raises(ClientError) as caught:
        s3.get_object_attributes(Bucket=bucket, Key="none", ObjectAttributes=names)
    assert code_of(caught) == (404, "NoSuchKey")
    with pytest.raises(ClientError) as caught:
        s3.get_object_attributes(Bucket=bucket, Key="k", ObjectAttributes=["Color"])
    assert code_of(caught) == (400, "InvalidArgument")


@pytest.mark.parametrize("body", [b"", b"data"])
def test_an_object_that_was_put_whole_is_its_only_part(s3: Any, bucket: str, body: bytes) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=body)
    part = s3.get_object(Bucket=bucket, Key="k", PartNumber=1)
    assert part["Body"].read() == body
    assert "PartsCount" not in part
    with pytest.raises(ClientError) as caught:
        s3.get_object(Bucket=bucket, Key="k", PartNumber=2)
    assert code_of(caught) == (400, "InvalidPart")


def test_the_crc_of_the_whole_is_made_of_its_parts_and_wrong_claims_are_refused(
    s3: Any, bucket: str
) -> None:
    created = {"ChecksumAlgorithm": "CRC32", "ChecksumType": "FULL_OBJECT"}
    upload_id, parts = upload(s3, bucket, "k", PIECES, **created)
    wrong_part = [{**parts[0], "ChecksumCRC32": parts[1]["ChecksumCRC32"]}, *parts[1:]]
    for listed, more, code in (
        (wrong_part, {}, "InvalidPart"),
        (parts, {"ChecksumCRC32": "AAAAAA=="}, "BadDigest"),
        (parts, {"ChecksumType": "COMPOSITE"}, "InvalidRequest"),
        (parts, {"MpuObjectSize": len(WHOLE) + 1}, "InvalidRequest"),
    ):
        with pytest.raises(ClientError) as caught:
            complete(s3, bucket, "k", upload_id, listed, **more)
        assert code_of(caught) == (400, code)
    crc = base64.b64encode(zlib.crc32(WHOLE).to_bytes(4, "big")).decode()
    done = complete(
        s3, bucket, "k", upload_id, parts, ChecksumCRC32=crc, ChecksumType="FULL_OBJECT"
    )
    assert (done["ChecksumCRC32"], done["ChecksumType"]) == (crc, "FULL_OBJECT")
    head = s3.head_object(Bucket=bucket, Key="k", ChecksumMode="ENABLED")
    assert head["ChecksumCRC32"] == crc


def test_a_copied_part_has_the_checksum_of_its_upload(s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="source", Body=WHOLE)
    upload_id = s3.create_multipart_upload(
        Bucket=bucket, Key="k", ChecksumAlgorithm="CRC32C", ChecksumType="FULL_OBJECT"
    )["UploadId"]
    ranges = (f"bytes=0-{PART_BYTES - 1}", f"bytes={PART_BYTES}-{len(WHOLE) - 1}")
    parts: list[dict[str, Any]] = []
    for number, copied in enumerate(ranges, 1):
        result = s3.upload_part_copy(
            Bucket=bucket,
            Key="k",
            UploadId=upload_id,
            PartNumber=number,
            CopySource={"Bucket": bucket, "Key": "source"},
            CopySourceRange=copied,
        )["CopyPartResult"]
        parts.append(
            {
                "PartNumber": number,
                "ETag": result["ETag"],
                "ChecksumCRC32C": result["ChecksumCRC32C"],
            }
        )
    listed = s3.list_parts(Bucket=bucket, Key="k", UploadId=upload_id)
    assert (listed["ChecksumAlgorithm"], listed["ChecksumType"]) == ("CRC32C", "FULL_OBJECT")
    assert [part["ChecksumCRC32C"] for part in listed["Parts"]] == [
        part["ChecksumCRC32C"] for part in parts
    ]
    done = complete(s3, bucket, "k", upload_id, parts)
    whole = s3.put_object(Bucket=bucket, Key="same", Body=WHOLE, ChecksumAlgorithm="CRC32C")
    assert done["ChecksumCRC32C"] == whole["ChecksumCRC32C"]
    assert s3.get_object(Bucket=bucket, Key="k")["Body"].read() == WHOLE


def test_a_part_whose_checksum_its_upload_has_no_use_for_is_refused(s3: Any, bucket: str) -> None:
    upload_id = s3.create_multipart_upload(Bucket=bucket, Key="k", ChecksumAlgorithm="SHA256")[
        "UploadId"
    ]
    with pytest.raises(ClientError) as caught:
        s3.upload_part(
            Bucket=bucket,
            Key="k",
            UploadId=upload_id,
            PartNumber=1,
            Body=b"a",
            ChecksumAlgorithm="SHA1",
        )
    assert code_of(caught) == (400, "InvalidRequest")


def test_a_part_without_a_checksum_gets_that_of_its_upload(
    server: RunningServer, s3: Any, bucket: str
) -> None:
    upload_id = s3.create_multipart_upload(Bucket=bucket, Key="k", ChecksumAlgorithm="SHA1")[
        "UploadId"
    ]
    path = f"/{bucket}/k?partNumber=1&uploadId={upload_id}"
    assert call(server, "PUT", path, b"data").status == 200
    (part,) = s3.list_parts(Bucket=bucket, Key="k", UploadId=upload_id)["Parts"]
    digest = hashlib.sha1(b"data", usedforsecurity=False).digest()
    assert part["ChecksumSHA1"] == base64.b64encode(digest).decode()


def test_uploads_roll_up_by_a_delimiter_in_pages(s3: Any, bucket: str) -> None:
    for key in ("a/1", "a/2", "b", "b", "c/d/1", "e"):
        s3.create_multipart_upload(Bucket=bucket, Key=key)
    found: list[str] = []
    markers: dict[str, str] = {}
    while True:
        page = s3.list_multipart_uploads(Bucket=bucket, Delimiter="/", MaxUploads=2, **markers)
        found += [entry["Key"] for entry in page.get("Uploads", [])]
        found += [entry["Prefix"] for entry in page.get("CommonPrefixes", [])]
        if not page["IsTruncated"]:
            break
        markers = {
            "KeyMarker": page["NextKeyMarker"],
            "UploadIdMarker": page.get("NextUploadIdMarker", ""),
        }
    assert sorted(found) == ["a/", "b", "b", "c/", "e"]
    inside = s3.list_multipart_uploads(Bucket=bucket, Prefix="c/", Delimiter="/")
    assert [entry["Prefix"] for entry in inside["CommonPrefixes"]] == ["c/d/"]
    by_digit = s3.list_multipart_uploads(Bucket=bucket, Prefix="b", Delimiter="0")
    assert [entry["Key"] for entry in by_digit["Uploads"]] == ["b", "b"]  # never by an upload id


# --- lifecycle -----------------------------------------------------------------------------------


def test_rules_are_shown_as_they_were_written_and_deleted(s3: Any, bucket: str) -> None:
    with pytest.raises(ClientError) as caught:
        s3.get_bucket_lifecycle_configuration(Bucket=bucket)
    assert code_of(caught) == (404, "NoSuchLifecycleConfiguration")
    rules = [
        {"ID": "a", "Prefix": "old/", "Status": "Enabled", "Expiration": {"Days": 2}},
        {
            "ID": "b",
            "Filter": {"Prefix": ""},
            "Status": "Disabled",
            "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 3},
        },
    ]
    s3.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration={"Rules": rules})
    assert s3.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"] == rules
    put = s3.put_object(Bucket=bucket, Key="old/k", Body=b"data")
    got = s3.get_object(Bucket=bucket, Key="old/k")
    assert got["Body"].read() == b"data"
    for answer in (put, s3.head_object(Bucket=bucket, Key="old/k"), got):
        assert answer["Expiration"].endswith('GMT", rule-id="a"')
    assert "Expiration" not in s3.put_object(Bucket=bucket, Key="k", Body=b"data")
    s3.delete_bucket_lifecycle(Bucket=bucket)
    with pytest.raises(ClientError) as caught:
        s3.get_bucket_lifecycle_configuration(Bucket=bucket)
    assert code_of(caught) == (404, "NoSuchLifecycleConfiguration")
    assert "Expiration" not in s3.head_object(Bucket=bucket, Key="old/k")


def test_a_rule_that_is_not_carried_out_is_refused_and_the_old_ones_stay(
    s3: Any, bucket: str
) -> None:
    rule = {"ID": "a", "Filter": {"Prefix": ""}, "Status": "Enabled", "Expiration": {"Days": 2}}
    s3.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration={"Rules": [rule]})
    dated = {**rule, "Expiration": {"Date": "2030-01-01"}}
    with pytest.raises(ClientError) as caught:
        s3.put_bucket_lifecycle_configuration(
            Bucket=bucket, LifecycleConfiguration={"Rules": [dated]}
        )
    assert code_of(caught) == (501, "NotImplemented")
    assert s3.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"] == [rule]


def test_a_server_expires_objects_and_aborts_uploads(tmp_path: Path) -> None:
    """With a day of half a second; the test waits for what has to go and looks at what stays."""
    settings = ("storage.lifecycle_day_s=0.5", "storage.lifecycle_interval_s=0.1")
    with start_server(tmp_path, *settings) as running:
        s3 = s3_client(running)
        s3.create_bucket(Bucket="short")
        for key in ("gone/1", "gone/2", "kept/1"):
            s3.put_object(Bucket="short", Key=key, Body=b"data")
        s3.create_multipart_upload(Bucket="short", Key="gone/3")
        rule = {
            "ID": "a",
            "Filter": {"Prefix": "gone/"},
            "Status": "Enabled",
            "Expiration": {"Days": 1},
            "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1},
        }
        s3.put_bucket_lifecycle_configuration(
            Bucket="short", LifecycleConfiguration={"Rules": [rule]}
        )
        ended = threading.Event()
        watch = threading.Timer(BOUND_S, ended.set)
        watch.start()
        while not ended.is_set():
            left = s3.list_objects_v2(Bucket="short")["KeyCount"]
            uploads = s3.list_multipart_uploads(Bucket="short").get("Uploads", [])
            if left == 1 and not uploads:
                break
        watch.cancel()
        assert not ended.is_set()
        assert s3.head_object(Bucket="short", Key="kept/1")["ContentLength"] == 4
        s3.close()
