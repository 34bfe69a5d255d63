"""Changes of one object's attributes or one bucket's configuration at the same time: none is lost,
and what was made private is private everywhere when the answer comes.
"""

from __future__ import annotations

import contextlib
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from objectcache_schemas.errors import Conflict, PreconditionFailed
from objectcache_schemas.messages.buckets import Bucket, ConfigureBucket, GetBucket
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.messages.reads import Object, StatObject
from objectcache_schemas.messages.writes import ReplaceAttributes
from objectcache_schemas.records import BucketConfiguration, EtagMode
from objectcache_storage_server.accounts.directory import FOLLOWED_TIMEOUT_S
from tests.admin_server import AdminServed
from tests.integration.fleet import RunningFleet
from tests.integration.served import BOUND_S, wait_until
from tests.s3_clients import call, s3_client, send
from tests.servers import running_server
from tests.storage_client import StorageClient

ROUNDS = 15
LIST_TAGS = {"TagSet": [{"Key": "k", "Value": "v"}]}


def test_a_change_of_tags_never_brings_back_a_list_that_was_made_private(tmp_path: Path) -> None:
    with (
        running_server(tmp_path / "data", "gateway.acls=true") as server,
        ThreadPoolExecutor(2) as threads,
    ):
        s3: Any = s3_client(server)
        s3.create_bucket(Bucket="bucket")
        for number in range(ROUNDS):
            named = {"Bucket": "bucket", "Key": f"key-{number}"}
            s3.put_object(**named, Body=b"data", ACL="public-read")
            tagging = threads.submit(s3.put_object_tagging, **named, Tagging=LIST_TAGS)
            closing = threads.submit(s3.put_object_acl, **named, ACL="private")
            tagging.result()
            closing.result()
            anonymous = send(server, "GET", f"/bucket/key-{number}")
            assert anonymous.status == 403
            assert s3.get_object_tagging(**named)["TagSet"] == LIST_TAGS["TagSet"]
        s3.close()


def test_whoever_changes_what_is_no_longer_there_is_refused(tmp_path: Path) -> None:
    with running_server(tmp_path / "data") as server:
        assert call(server, "PUT", "/bucket").status == 200
        assert call(server, "PUT", "/bucket/key", b"data").status == 200
        with StorageClient(server.run_dir / "storage.sock") as storage:
            seen = storage.ask(StatObject(bucket="bucket", key="key"), Object).info
            first = msgspec.structs.replace(seen.attributes, tags={"a": "1"})
            request = ReplaceAttributes(bucket="bucket", seen=seen, attributes=first)
            changed = storage.ask(request, Object).info
            with pytest.raises(PreconditionFailed):
                storage.ask(request, Object)
            assert storage.ask(StatObject(bucket="bucket", key="key"), Object).info == changed
            configuration = BucketConfiguration(tags={"a": "1"})
            configure = ConfigureBucket(
                name="bucket", configuration=configuration, replaces=BucketConfiguration()
            )
            storage.ask(configure, Done)
            with pytest.raises(Conflict) as caught:
                storage.ask(configure, Done)
            assert caught.value.code == "OperationAborted"
            kept = storage.ask(GetBucket(name="bucket"), Bucket).info.configuration
            assert kept == configuration


def test_an_operator_and_a_tenant_who_configure_a_bucket_undo_nothing_of_each_other(
    tmp_path: Path,
) -> None:
    with AdminServed(tmp_path / "data") as served, ThreadPoolExecutor(1) as threads:
        made = served.ask("POST", "/v1/buckets", {"name": "bucket", "owner": "root"})
        assert made.status == 201
        tenant = threads.submit(set_tags, served.storage_socket, ROUNDS)
        quotas = [{"object_count": number} for number in range(1, ROUNDS + 1)]
        answers = [served.ask("PATCH", "/v1/buckets/bucket/quota", quota) for quota in quotas]
        tenant.result()
        wanted = {answer.status for answer in answers}
        assert wanted <= {200, 409}
        last = max(n for n, answer in enumerate(answers, 1) if answer.status == 200)
        with StorageClient(served.storage_socket) as storage:
            left = storage.ask(GetBucket(name="bucket"), Bucket).info.configuration
    assert left.tags == {str(number): "" for number in range(ROUNDS)}
    assert left.quota.object_count == last


def set_tags(socket_path: str, count: int) -> None:
    """One tag after the other, each kept besides those before."""
    with StorageClient(socket_path) as storage:
        number = 0
        while number < count:
            seen = storage.ask(GetBucket(name="bucket"), Bucket).info.configuration
            wanted = msgspec.structs.replace(seen, tags={**seen.tags, str(number): ""})
            configure = ConfigureBucket(name="bucket", configuration=wanted, replaces=seen)
            try:
                storage.ask(configure, Done)
            except Conflict:
                continue
            number += 1


def test_a_new_bucket_has_what_it_was_made_with_from_its_first_moment(tmp_path: Path) -> None:
    with AdminServed(tmp_path / "data") as served:
        body = {"name": "bucket", "owner": "root", "etag_mode": "opaque"}
        assert served.ask("POST", "/v1/buckets", body).status == 201
        with StorageClient(served.storage_socket) as storage:
            made = storage.ask(GetBucket(name="bucket"), Bucket).info
        assert made.configuration == BucketConfiguration(etag_mode=EtagMode.OPAQUE)


def test_a_list_made_private_is_in_force_in_every_gateway_when_the_answer_comes(
    tmp_path: Path,
) -> None:
    with RunningFleet(tmp_path, 1, "gateway.acls=true", gateways=3) as fleet:
        owner = fleet.s3()
        owner.create_bucket(Bucket="bucket")
        for _ in range(5):
            owner.put_bucket_acl(Bucket="bucket", ACL="public-read")
            assert [listed(each, "bucket") for each in fleet.endpoints] == [200] * 3
            owner.put_bucket_acl(Bucket="bucket", ACL="private")
            assert [listed(each, "bucket") for each in fleet.endpoints] == [403] * 3
        owner.close()


def test_a_rule_of_a_bucket_is_in_force_in_every_gateway_when_the_answer_comes(
    tmp_path: Path,
) -> None:
    """Gateways keep what they know of a bucket, unlike its list, which they ask for each time."""
    with RunningFleet(tmp_path, 1, gateways=3) as fleet, contextlib.ExitStack() as closing:
        clients = [
            closing.enter_context(contextlib.closing(s3)) for s3 in map(fleet.s3, fleet.endpoints)
        ]
        owner = clients[0]
        owner.create_bucket(Bucket="bucket")
        owner.put_object(Bucket="bucket", Key="key", Body=b"data")
        rule = {
            "ID": "all",
            "Status": "Enabled",
            "Filter": {"Prefix": ""},
            "Expiration": {"Days": 1},
        }

        def all_find(expires: bool) -> bool:
            heads = [each.head_object(Bucket="bucket", Key="key") for each in clients]
            return ["Expiration" in head for head in heads] == [expires] * 3

        judged = 0
        for number in range(ROUNDS):
            expires = number % 2 == 0
            assert all_find(not expires)
            begun_s = time.monotonic()
            if expires:
                owner.put_bucket_lifecycle_configuration(
                    Bucket="bucket", LifecycleConfiguration={"Rules": [rule]}
                )
            else:
                owner.delete_bucket_lifecycle(Bucket="bucket")
            if time.monotonic() - begun_s < FOLLOWED_TIMEOUT_S:
                assert all_find(expires)
                judged += 1
            else:  # one that a busy machine kept from hearing of it was waited for no longer
                wait_until(partial(all_find, expires), "all gateways to hear of it")
        assert judged


def listed(endpoint: str, bucket: str) -> int:
    """The status of a list that nobody signed, over a connection of its own."""
    url = f"{endpoint}/{bucket}?list-type=2"
    try:
        with urllib.request.urlopen(url, timeout=BOUND_S) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
