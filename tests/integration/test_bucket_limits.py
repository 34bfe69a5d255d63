"""Tenants who configure their buckets at length, send dear XML, or ask for checks of a copy."""

from __future__ import annotations

import base64
import hashlib
import secrets
import zlib
from collections.abc import Iterator

import pytest

from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import RULE_PREFIX_BYTES_MAX
from objectcache_schemas.messages.buckets import Buckets, ConfigureBucket, ListBuckets
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.records import BucketConfiguration, LifecycleRule
from tests.integration.tenants import Tenant, new_tenant
from tests.servers import RunningServer
from tests.storage_client import StorageClient

DATA = bytes(range(256)) * 1024  # above what travels within a message


@pytest.fixture
def alice(server: RunningServer) -> Tenant:
    return new_tenant(server, "alice", may_create_buckets=True)


@pytest.fixture
def own(alice: Tenant) -> str:
    return alice.new_bucket()


@pytest.fixture
def storage(server: RunningServer) -> Iterator[StorageClient]:
    with StorageClient(server.run_dir / "storage.sock") as client:
        yield client


def lifecycle(prefix: str) -> bytes:
    return (
        f"<LifecycleConfiguration><Rule><Filter><Prefix>{prefix}</Prefix></Filter><Status>Enabled"
        "</Status><Expiration><Days>1</Days></Expiration></Rule></LifecycleConfiguration>"
    ).encode()


def names_of(tenant: Tenant, query: str = "") -> list[str | None]:
    answer = tenant.call("GET", f"/{query}")
    assert answer.status == 200
    return [name.text for name in answer.xml.iterfind("{*}Buckets/{*}Bucket/{*}Name")]


def test_a_long_lifecycle_prefix_is_refused_and_a_large_document_too(
    alice: Tenant, own: str
) -> None:
    path = f"/{own}?lifecycle"
    assert alice.call("PUT", path, lifecycle("p" * RULE_PREFIX_BYTES_MAX)).status == 200
    answer = alice.call("PUT", path, lifecycle("p" * (RULE_PREFIX_BYTES_MAX + 1)))
    assert (answer.status, answer.code) == (400, "InvalidArgument")
    assert alice.call("PUT", path, lifecycle("p" * 1_900_000)).code == "EntityTooLarge"
    assert b"<Prefix>" + b"p" * RULE_PREFIX_BYTES_MAX + b"</Prefix>" in alice.call("GET", path).body


def test_the_storage_server_refuses_what_a_gateway_should_not_have_sent(
    storage: StorageClient, own: str
) -> None:
    rule = LifecycleRule(rule_id="r", prefix="p" * (RULE_PREFIX_BYTES_MAX + 1), expiration_days=1)
    configuration = BucketConfiguration(lifecycle=(rule,))
    change = ConfigureBucket(name=own, configuration=configuration, replaces=BucketConfiguration())
    with pytest.raises(InvalidRequest, match="prefix"):
        storage.ask(change, Done)


def test_buckets_are_listed_page_by_page_and_without_what_their_owners_configured(
    storage: StorageClient, alice: Tenant
) -> None:
    names = sorted(alice.new_bucket() for _ in range(4))
    for name in names:
        assert alice.call("PUT", f"/{name}?lifecycle", lifecycle("old/")).status == 200
    page = storage.ask(ListBuckets(start_after=names[0], limit=2), Buckets)
    assert [info.name for info in page.buckets] == names[1:3]
    assert page.next_start_after == names[2]
    assert not any(info.configuration.lifecycle for info in page.buckets)
    full = storage.ask(ListBuckets(limit=2, with_configuration=True, start_after=names[0]), Buckets)
    assert all(info.configuration.lifecycle for info in full.buckets)
    assert names_of(alice) == names
    assert names_of(alice, "?max-buckets=3") == names[:3]


@pytest.mark.parametrize("query", ["tagging", "acl", ""])
def test_a_body_that_is_small_in_s3_is_refused_where_it_is_large(
    alice: Tenant, own: str, query: str
) -> None:
    path = f"/{own}?{query}" if query else f"/{own}-more"
    answer = alice.call("PUT", path, b"<a>" + b" " * (200 << 10) + b"</a>")
    assert (answer.status, answer.code) == (400, "EntityTooLarge")


def test_a_body_of_countless_elements_is_malformed(alice: Tenant, own: str) -> None:
    answer = alice.call("POST", f"/{own}?delete", b"<Delete>" + b"<a/>" * 500_000 + b"</Delete>")
    assert (answer.status, answer.code) == (400, "MalformedXML")
    assert "elements" in answer.body.decode()


def test_a_copy_is_refused_where_the_source_is_not_whose_it_is_said_to_be(
    alice: Tenant, own: str
) -> None:
    other = alice.new_bucket()
    assert alice.call("PUT", f"/{other}/k", b"data").status == 200
    upload = alice.call("POST", f"/{own}/joined?uploads").xml.findtext("{*}UploadId")
    for path in (f"/{own}/copy", f"/{own}/joined?uploadId={upload}&partNumber=1"):
        named = {"x-amz-copy-source": f"/{other}/k"}
        wrong = named | {"x-amz-source-expected-bucket-owner": "somebody"}
        assert alice.call("PUT", path, headers=wrong).code == "AccessDenied"
        right = named | {"x-amz-source-expected-bucket-owner": alice.name}
        assert alice.call("PUT", path, headers=right).status == 200


@pytest.mark.parametrize("data", [b"", b"small", DATA])
def test_a_copy_carries_the_checksum_that_is_asked_for(
    alice: Tenant, own: str, data: bytes
) -> None:
    assert alice.call("PUT", f"/{own}/k", data).status == 200
    values = {
        "sha256": hashlib.sha256(data).digest(),
        "crc32": zlib.crc32(data).to_bytes(4, "big"),
    }
    for algorithm, value in values.items():
        key, text = f"{algorithm}-{secrets.token_hex(4)}", base64.b64encode(value).decode()
        asked = {
            "x-amz-copy-source": f"/{own}/k",
            "x-amz-checksum-algorithm": algorithm.upper(),
        }
        answer = alice.call("PUT", f"/{own}/{key}", headers=asked)
        assert answer.xml.findtext(f"{{*}}Checksum{algorithm.upper()}") == text
        headers = {"x-amz-checksum-mode": "ENABLED"}
        stored = alice.call("GET", f"/{own}/{key}", headers=headers)
        assert stored.body == data
        assert stored.headers[f"x-amz-checksum-{algorithm}"] == text
        # A copy of the copy has it already.
        again = asked | {"x-amz-copy-source": f"/{own}/{key}"}
        answer = alice.call("PUT", f"/{own}/{key}-again", headers=again)
        assert answer.xml.findtext(f"{{*}}Checksum{algorithm.upper()}") == text


def test_a_copy_with_an_algorithm_that_nobody_knows_is_refused(alice: Tenant, own: str) -> None:
    assert alice.call("PUT", f"/{own}/k", b"data").status == 200
    asked = {"x-amz-copy-source": f"/{own}/k", "x-amz-checksum-algorithm": "MD4"}
    assert alice.call("PUT", f"/{own}/copy", headers=asked).code == "InvalidArgument"
    assert alice.call("GET", f"/{own}/copy").status == 404
