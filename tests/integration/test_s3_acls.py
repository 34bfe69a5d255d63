"""Access control lists: honoured where gateway.acls is on, refused where it is off."""

from __future__ import annotations

import http.client
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import ClientError

from objectcache_schemas.accounts import Access, Grant
from tests.s3_clients import boto3_client, s3_client
from tests.s3_tests.accounts import add_user
from tests.servers import RunningServer, start_server

AccessList = dict[str, Any]


@pytest.fixture(scope="module")
def open_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with start_server(tmp_path_factory.mktemp("acls") / "data", "gateway.acls=true") as server:
        yield server


@pytest.fixture
def owner(open_server: RunningServer) -> Any:
    return s3_client(open_server)


@pytest.fixture
def nobody(open_server: RunningServer) -> Any:
    return unsigned(open_server)


def unsigned(server: RunningServer) -> Any:
    return boto3_client(
        endpoint_url=server.endpoint,
        region_name="us-east-1",
        config=Config(signature_version=UNSIGNED, retries={"total_max_attempts": 1}),
    )


def a_user(server: RunningServer, *scope: Grant) -> tuple[str, Any]:
    """The name and a client of a new user."""
    user = add_user(server, f"user-{secrets.token_hex(4)}", scope=scope)
    client = s3_client(server, access_key=user.access_key, secret_key=user.secret_key)
    return user.name, client


def a_bucket(client: Any, **more: Any) -> str:
    name = f"bucket-{secrets.token_hex(6)}"
    client.create_bucket(Bucket=name, **more)
    return name


@contextmanager
def fails_with(code: str) -> Iterator[None]:
    with pytest.raises(ClientError) as caught:
        yield
    assert caught.value.response["Error"]["Code"] == code


def test_a_published_object_is_read_by_everybody_and_nothing_else_is(
    owner: Any, nobody: Any
) -> None:
    bucket = a_bucket(owner)
    owner.put_object(Bucket=bucket, Key="open", Body=b"for all", ACL="public-read")
    owner.put_object(Bucket=bucket, Key="closed", Body=b"for me")
    assert nobody.get_object(Bucket=bucket, Key="open")["Body"].read() == b"for all"
    for key in ("closed", "missing"):  # whether a key is stored is not told
        with fails_with("AccessDenied"):
            nobody.get_object(Bucket=bucket, Key=key)
    with fails_with("AccessDenied"):
        nobody.list_objects_v2(Bucket=bucket)
    with fails_with("AccessDenied"):
        nobody.put_object(Bucket=bucket, Key="open", Body=b"mine")


def test_a_bucket_that_all_may_write_is_still_the_owners(owner: Any, nobody: Any) -> None:
    bucket = a_bucket(owner, ACL="public-read-write")
    nobody.put_object(Bucket=bucket, Key="gift", Body=b"bytes")
    assert owner.get_object(Bucket=bucket, Key="gift")["Body"].read() == b"bytes"
    assert [entry["Key"] for entry in nobody.list_objects_v2(Bucket=bucket)["Contents"]] == ["gift"]
    nobody.delete_object(Bucket=bucket, Key="gift")
    for call in (nobody.delete_bucket, nobody.get_bucket_acl, nobody.get_bucket_tagging):
        with fails_with("AccessDenied"):
            call(Bucket=bucket)
    owner.put_bucket_acl(Bucket=bucket, ACL="private")
    with fails_with("AccessDenied"):
        nobody.put_object(Bucket=bucket, Key="gift", Body=b"bytes")


def test_one_user_may_be_let_in_and_another_not(open_server: RunningServer, owner: Any) -> None:
    (guest_name, guest), (_, other) = a_user(open_server), a_user(open_server)
    bucket = a_bucket(owner)
    owner.put_object(Bucket=bucket, Key="key", Body=b"bytes")
    policy = owner.get_object_acl(Bucket=bucket, Key="key")
    assert [grant["Permission"] for grant in policy["Grants"]] == ["FULL_CONTROL"]
    policy["Grants"].append(
        {"Grantee": {"Type": "CanonicalUser", "ID": guest_name}, "Permission": "READ"}
    )
    wanted: AccessList = {"Grants": policy["Grants"], "Owner": policy["Owner"]}
    owner.put_object_acl(Bucket=bucket, Key="key", AccessControlPolicy=wanted)
    assert guest.get_object(Bucket=bucket, Key="key")["Body"].read() == b"bytes"
    guest.copy_object(
        Bucket=a_bucket(guest), Key="copy", CopySource={"Bucket": bucket, "Key": "key"}
    )
    with fails_with("AccessDenied"):
        guest.put_object_acl(Bucket=bucket, Key="key", ACL="public-read")
    with fails_with("AccessDenied"):
        other.get_object(Bucket=bucket, Key="key")
    shown = owner.get_object_acl(Bucket=bucket, Key="key")["Grants"]
    assert [(grant["Grantee"]["ID"], grant["Permission"]) for grant in shown] == [
        (guest_name, "READ"),
        ("root", "FULL_CONTROL"),
    ]


def test_a_list_does_not_widen_the_scope_of_a_key(open_server: RunningServer, owner: Any) -> None:
    elsewhere = Grant(bucket="elsewhere", access=(Access.READ,))
    _, narrow = a_user(open_server, elsewhere)
    bucket = a_bucket(owner, ACL="public-read-write")
    owner.put_object(Bucket=bucket, Key="open", Body=b"for all", ACL="public-read")
    with fails_with("AccessDenied"):
        narrow.get_object(Bucket=bucket, Key="open")


def test_what_another_user_uploads_shows_whose_it_is(
    open_server: RunningServer, owner: Any
) -> None:
    name, guest = a_user(open_server)
    bucket = a_bucket(owner, ACL="public-read-write")
    guest.create_multipart_upload(Bucket=bucket, Key="theirs")
    owner.create_multipart_upload(Bucket=bucket, Key="zours")
    uploads = owner.list_multipart_uploads(Bucket=bucket)["Uploads"]
    assert [upload["Owner"]["ID"] for upload in uploads] == [name, "root"]
    guest.put_object(Bucket=bucket, Key="single", Body=b"bytes")
    assert guest.get_object_acl(Bucket=bucket, Key="single")["Owner"]["ID"] == name
    assert owner.get_object(Bucket=bucket, Key="single")["Body"].read() == b"bytes"


def test_a_client_without_a_signature_learns_only_what_lists_allow(
    open_server: RunningServer, nobody: Any
) -> None:
    assert nobody.list_buckets()["Buckets"] == []
    with fails_with("AccessDenied"):
        nobody.create_bucket(Bucket="of-nobody")
    connection = http.client.HTTPConnection(open_server.host, open_server.port, timeout=20)
    connection.request("PUT", "/of-nobody/key", body=b"x", headers={"Expect": "100-continue"})
    assert connection.getresponse().status == 404
    connection.close()


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("<AccessControlPolicy/>", "MalformedXML"),
        ("<!DOCTYPE a><AccessControlPolicy/>", "MalformedXML"),
        (
            "<Grant><Grantee><ID>a</ID></Grantee><Permission>ALL</Permission></Grant>",
            "MalformedXML",
        ),
        ("<Grant><Permission>READ</Permission></Grant>", "MalformedXML"),
        (
            "<Grant><Grantee><URI>http://x</URI></Grantee><Permission>READ</Permission></Grant>",
            "InvalidArgument",
        ),
        (
            "<Grant><Grantee><ID>a b</ID></Grantee><Permission>READ</Permission></Grant>",
            "InvalidArgument",
        ),
    ],
)
def test_a_list_that_cannot_be_read_changes_nothing(owner: Any, body: str, code: str) -> None:
    bucket = a_bucket(owner)
    listed = f"<AccessControlPolicy><AccessControlList>{body}</AccessControlList>"
    whole = f"{listed}</AccessControlPolicy>" if body.startswith("<Grant>") else body

    def replace_body(params: AccessList, **_: Any) -> None:
        params["body"] = whole.encode()

    owner.meta.events.register("before-call.s3.PutBucketAcl", replace_body)
    with fails_with(code):
        owner.put_bucket_acl(Bucket=bucket, AccessControlPolicy={"Grants": []})
    grants = owner.get_bucket_acl(Bucket=bucket)["Grants"]
    assert [grant["Permission"] for grant in grants] == ["FULL_CONTROL"]


def test_where_lists_are_not_honoured_only_the_owners_alone_is_accepted(
    server: RunningServer, s3: Any, bucket: str
) -> None:
    s3.put_object(Bucket=bucket, Key="key", Body=b"bytes", ACL="private")
    s3.put_object_acl(Bucket=bucket, Key="key", ACL="private")
    s3.put_bucket_acl(Bucket=bucket, ACL="private")
    for call, more in (
        (s3.put_object, {"Key": "key", "Body": b"other"}),
        (s3.put_object_acl, {"Key": "key"}),
        (s3.put_bucket_acl, {}),
    ):
        with fails_with("NotImplemented"):
            call(Bucket=bucket, ACL="public-read", **more)
    with fails_with("InvalidArgument"):
        s3.put_bucket_acl(Bucket=bucket, ACL="public-ready")
    with fails_with("AccessDenied"):
        unsigned(server).get_object(Bucket=bucket, Key="key")
    assert s3.get_object(Bucket=bucket, Key="key")["Body"].read() == b"bytes"
