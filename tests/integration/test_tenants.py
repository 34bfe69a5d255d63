"""Two users over HTTP: what is not granted is denied, and nothing is learnt from the denial."""

from __future__ import annotations

import time
from urllib.parse import quote

import msgspec
import pytest

from objectcache_schemas.accounts import Access
from objectcache_schemas.descriptor import DeliveryMode, Descriptor, MatchReply, MatchRequest
from objectcache_schemas.errors import Conflict, NotFound
from tests.integration.tenants import Tenant, grant, new_tenant
from tests.s3_clients import call, open_socket, receive_answer, send_head, signed_headers
from tests.servers import Credentials, RunningServer

READ, WRITE, ADMIN = Access.READ, Access.WRITE, Access.ADMIN
DELETE_TWO = b"<Delete><Object><Key>a/1</Key></Object><Object><Key>b/1</Key></Object></Delete>"
MATCH = msgspec.msgpack.encode(MatchRequest(v=1, chunk_keys=("a/1", "b/1")))


def descriptor(*keys: str) -> Descriptor:
    return Descriptor(keys, 1, 16, 4, DeliveryMode.CHUNKWISE)


def put_body(*keys: str) -> bytes:
    head = descriptor(*keys).to_bytes()
    return len(head).to_bytes(4, "big") + head + b"data" * len(keys)


# Every kind of request on somebody's bucket, on keys that exist and on keys that do not.
REQUESTS = [
    ("HEAD", "", b""),
    ("GET", "", b""),
    ("GET", "?list-type=2", b""),
    ("GET", "?list-type=2&prefix=a%2F", b""),
    ("GET", "?versions", b""),
    ("GET", "?uploads", b""),
    ("GET", "?location", b""),
    ("GET", "?acl", b""),
    ("GET", "?policy", b""),
    ("GET", "?tagging", b""),
    ("GET", "?lifecycle", b""),
    ("GET", "?kv-layout", b""),
    ("PUT", "?kv-layout", b"\x80"),
    ("DELETE", "", b""),
    ("DELETE", "?lifecycle", b""),
    ("POST", "?delete", DELETE_TWO),
    ("POST", "?kv-match", MATCH),
    ("POST", "?kv-get", descriptor("a/1").to_bytes()),
    ("POST", "?kv-put", put_body("new")),
    *(
        (method, f"/{key}{query}", body)
        for key in ("a/1", "none")
        for method, query, body in (
            ("GET", "", b""),
            ("HEAD", "", b""),
            ("PUT", "", b"theirs"),
            ("DELETE", "", b""),
            ("GET", "?acl", b""),
            ("GET", "?tagging", b""),
            ("POST", "?uploads", b""),
            ("PUT", "?uploadId=1&partNumber=1", b"part"),
            ("GET", "?uploadId=1", b""),
            ("DELETE", "?uploadId=1", b""),
        )
    ),
]


@pytest.fixture
def alice(server: RunningServer) -> Tenant:
    return new_tenant(server, "alice")


@pytest.fixture
def bob(server: RunningServer) -> Tenant:
    return new_tenant(server, "bob")


@pytest.fixture
def filled(alice: Tenant) -> str:
    """Alice's bucket with the objects a/1, a/2 and b/1."""
    name = alice.new_bucket()
    for key in ("a/1", "a/2", "b/1"):
        assert alice.call("PUT", f"/{name}/{key}", b"data").status == 200
    return name


def keys_of(tenant: Tenant, bucket: str, prefix: str = "") -> list[str | None]:
    listing = tenant.call("GET", f"/{bucket}?list-type=2&prefix={quote(prefix, safe='')}")
    assert listing.status == 200, listing.body
    return [key.text for key in listing.xml.iterfind("{*}Contents/{*}Key")]


# --- strangers ------------------------------------------------------------------------------------


def test_a_stranger_is_denied_everything_alike_and_changes_nothing(
    alice: Tenant, bob: Tenant, filled: str
) -> None:
    for method, suffix, body in REQUESTS:
        answer = bob.call(method, f"/{filled}{suffix}", body)
        assert answer.status == 403, (method, suffix, answer.body)
        assert method == "HEAD" or answer.code == "AccessDenied"
    assert keys_of(alice, filled) == ["a/1", "a/2", "b/1"]
    assert alice.call("GET", f"/{filled}/a/1").body == b"data"


def test_a_denial_says_the_same_of_a_key_that_exists_and_of_one_that_does_not(
    bob: Tenant, filled: str
) -> None:
    there, not_there = (bob.call("GET", f"/{filled}/{key}") for key in ("a/1", "none"))
    assert there.xml.findtext("Message") == not_there.xml.findtext("Message")


def test_who_may_not_make_buckets_cannot_ask_which_names_are_taken(
    server: RunningServer, filled: str
) -> None:
    carol = new_tenant(server, "carol", may_create_buckets=False)
    for name in (filled, "nobody-has-this-bucket"):
        for method in ("GET", "PUT"):
            answer = carol.call(method, f"/{name}")
            assert (answer.status, answer.code) == (403, "AccessDenied"), (name, method)


def test_who_may_make_buckets_is_told_what_s3_tells(bob: Tenant, filled: str) -> None:
    assert bob.call("GET", "/nobody-has-this-bucket").code == "NoSuchBucket"
    taken = bob.call("PUT", f"/{filled}")
    assert (taken.status, taken.code) == (409, "BucketAlreadyExists")


def test_the_root_key_may_do_everything(server: RunningServer, filled: str) -> None:
    assert call(server, "GET", f"/{filled}/a/1").body == b"data"
    names = call(server, "GET", "/").xml.iterfind("{*}Buckets/{*}Bucket/{*}Name")
    assert filled in [name.text for name in names]


# --- grants ---------------------------------------------------------------------------------------


def test_a_grant_is_in_force_once_it_is_made_and_no_longer_than_that(
    bob: Tenant, filled: str
) -> None:
    bob.change_user(grants=(grant(filled, READ),))
    assert bob.call("GET", f"/{filled}/a/1").body == b"data"
    assert bob.call("GET", f"/{filled}/none").code == "NoSuchKey"
    assert keys_of(bob, filled) == ["a/1", "a/2", "b/1"]
    assert bob.call("PUT", f"/{filled}/a/3", b"x").status == 403
    assert bob.call("DELETE", f"/{filled}").status == 403
    bob.change_user(grants=())
    assert bob.call("GET", f"/{filled}/a/1").status == 403


def test_a_grant_ends_with_its_bucket_and_not_with_its_name(
    server: RunningServer, alice: Tenant, bob: Tenant
) -> None:
    carol = new_tenant(server, "carol")
    name = carol.new_bucket()
    bob.change_user(grants=(grant(name, READ, WRITE),))
    assert bob.call("PUT", f"/{name}/k", b"mine").status == 200
    assert bob.call("DELETE", f"/{name}/k").status == 204
    assert carol.call("DELETE", f"/{name}").status == 204
    assert bob.call("GET", f"/{name}/k").code == "NoSuchBucket"
    assert alice.call("PUT", f"/{name}").status == 200
    assert alice.call("PUT", f"/{name}/k", b"hers").status == 200
    for method in ("GET", "PUT", "DELETE"):
        assert bob.call(method, f"/{name}/k", b"x" * (method == "PUT")).status == 403
    bob.change_user(grants=(grant("*", READ),))
    assert bob.call("GET", f"/{name}/k").body == b"hers"


def test_nothing_can_be_granted_on_a_bucket_that_is_not_there(bob: Tenant) -> None:
    with pytest.raises(NotFound, match="make it first") as caught:
        bob.change_user(grants=(grant("nobody-has-this-bucket", READ),))
    assert caught.value.code == "NoSuchBucket"


def test_write_alone_puts_and_deletes_and_reads_nothing(bob: Tenant, filled: str) -> None:
    bob.change_user(grants=(grant(filled, WRITE),))
    assert bob.call("PUT", f"/{filled}/a/3", b"x").status == 200
    assert bob.call("DELETE", f"/{filled}/a/3").status == 204
    for path in ("/a/1", "/none", "", "?acl"):
        assert bob.call("GET", f"/{filled}{path}").status == 403, path
    assert bob.call("HEAD", f"/{filled}").status == 200  # who may do anything may ask for that


def test_admin_alone_configures_and_reads_nothing(bob: Tenant, filled: str) -> None:
    bob.change_user(grants=(grant(filled, ADMIN),))
    tags = b"<Tagging><TagSet><Tag><Key>k</Key><Value>v</Value></Tag></TagSet></Tagging>"
    assert bob.call("PUT", f"/{filled}?tagging", tags).status == 204
    assert bob.call("GET", f"/{filled}/a/1").status == 403
    assert bob.call("DELETE", f"/{filled}").code == "BucketNotEmpty"


def test_a_prefix_bounds_keys_listings_and_lists_of_keys(bob: Tenant, filled: str) -> None:
    bob.change_user(grants=(grant(filled, READ, WRITE, prefix="a/"),))
    assert bob.call("GET", f"/{filled}/a/1").status == 200
    assert bob.call("GET", f"/{filled}/b/1").status == 403
    assert keys_of(bob, filled, "a/") == ["a/1", "a/2"]
    for prefix in ("", "a", "b/"):
        query = f"list-type=2&prefix={quote(prefix, safe='')}"
        assert bob.call("GET", f"/{filled}?{query}").code == "AccessDenied"
    answer = bob.call("POST", f"/{filled}?delete", DELETE_TWO)
    assert answer.status == 200
    assert [key.text for key in answer.xml.iterfind("{*}Deleted/{*}Key")] == ["a/1"]
    errors = [
        (error.findtext("{*}Key"), error.findtext("{*}Code"))
        for error in answer.xml.iterfind("{*}Error")
    ]
    assert errors == [("b/1", "AccessDenied")]


def test_a_copy_needs_read_of_its_source(alice: Tenant, bob: Tenant, filled: str) -> None:
    own = bob.new_bucket()
    for key in ("a/1", "none"):
        answer = bob.call("PUT", f"/{own}/copy", headers={"x-amz-copy-source": f"/{filled}/{key}"})
        assert (answer.status, answer.code) == (403, "AccessDenied")
    bob.change_user(grants=(grant(filled, READ, prefix="a/"),))
    copied = {"x-amz-copy-source": f"/{filled}/a/1"}
    assert bob.call("PUT", f"/{own}/copy", headers=copied).status == 200
    other = {"x-amz-copy-source": f"/{filled}/b/1"}
    assert bob.call("PUT", f"/{own}/copy", headers=other).status == 403
    upload = bob.call("POST", f"/{own}/joined?uploads").xml.findtext("{*}UploadId")
    part = f"/{own}/joined?uploadId={upload}&partNumber=1"
    assert bob.call("PUT", part, headers=other).status == 403
    assert bob.call("PUT", part, headers=copied).status == 200


def test_buckets_are_listed_that_one_owns_or_was_granted_something_in(
    alice: Tenant, bob: Tenant, filled: str
) -> None:
    own = bob.new_bucket()

    def listed(tenant: Tenant) -> list[str | None]:
        names = tenant.call("GET", "/").xml.iterfind("{*}Buckets/{*}Bucket/{*}Name")
        return [name.text for name in names]

    assert listed(bob) == [own]
    bob.change_user(grants=(grant(filled, READ, prefix="a/"),))
    assert listed(bob) == sorted([own, filled])
    assert listed(alice) == [filled]
    assert listed(bob.another_key(scope=(grant(own, READ),))) == [own]


# --- prefixes of chunks ---------------------------------------------------------------------------


def test_each_chunk_of_a_prefix_is_checked_before_any_is_looked_for(
    alice: Tenant, bob: Tenant, filled: str
) -> None:
    bob.change_user(grants=(grant(filled, READ, WRITE, prefix="a/"),))
    own = bob.call("POST", f"/{filled}?kv-get", descriptor("a/1", "a/2").to_bytes())
    assert own.body == b"datadata"
    for keys in (("a/1", "b/1"), ("a/1", "b/none")):
        wanted = MatchRequest(v=1, chunk_keys=keys)
        for query, body in (
            ("kv-get", descriptor(*keys).to_bytes()),
            ("kv-match", msgspec.msgpack.encode(wanted)),
            ("kv-put", put_body(*keys)),
        ):
            answer = bob.call("POST", f"/{filled}?{query}", body)
            assert (answer.status, answer.code) == (403, "AccessDenied"), (query, keys)
            assert keys[1] in (answer.xml.findtext("Message") or "")
    assert keys_of(alice, filled) == ["a/1", "a/2", "b/1"]
    assert bob.call("POST", f"/{filled}?kv-put", put_body("a/3", "a/4")).status == 200
    matched = bob.call(
        "POST",
        f"/{filled}?kv-match",
        msgspec.msgpack.encode(MatchRequest(v=1, chunk_keys=("a/3",))),
    )
    assert msgspec.msgpack.decode(matched.body, type=MatchReply).matched == 1


def test_the_chunk_before_a_put_is_checked_too(bob: Tenant, filled: str) -> None:
    bob.change_user(grants=(grant(filled, WRITE, prefix="a/"),))
    asked = Descriptor(("a/9",), 1, 16, 4, DeliveryMode.CHUNKWISE, parent_key="b/1")
    head = asked.to_bytes()
    answer = bob.call("POST", f"/{filled}?kv-put", len(head).to_bytes(4, "big") + head + b"data")
    assert (answer.status, answer.code) == (403, "AccessDenied")


# --- keys -----------------------------------------------------------------------------------------


def test_a_secret_is_rotated_without_a_gap(alice: Tenant, filled: str) -> None:
    fresh = alice.another_key()
    assert alice.call("GET", f"/{filled}/a/1").status == 200
    assert fresh.call("GET", f"/{filled}/a/1").status == 200
    alice.delete_key()
    assert alice.call("GET", f"/{filled}/a/1").code == "InvalidAccessKeyId"
    assert fresh.call("GET", f"/{filled}/a/1").status == 200


def test_why_a_key_is_not_in_force_is_told_to_whoever_has_its_secret_and_to_nobody_else(
    alice: Tenant, filled: str
) -> None:
    path = f"/{filled}/a/1"
    unknown = call(alice.server, "GET", path, credentials=Credentials("never-made", "12345678"))
    disabled = alice.another_key(enabled=False)
    expired = alice.another_key(expires_s=time.time() - 1)
    for key, why in ((disabled, "is disabled"), (expired, "has expired")):
        answer = key.call("GET", path)
        assert (answer.status, answer.code) == (403, "InvalidAccessKeyId")
        assert answer.xml.findtext("Message") == f"the access key {why}"
        guess = Credentials(key.key.access_key, "a-guess-of-it")
        guessed = call(alice.server, "GET", path, credentials=guess)
        assert (guessed.status, guessed.code) == (403, "InvalidAccessKeyId")
        assert guessed.xml.findtext("Message") == unknown.xml.findtext("Message")
    assert alice.another_key(expires_s=time.time() + 3600).call("GET", path).status == 200
    alice.change_user(enabled=False)
    answer = alice.call("GET", path)
    assert (answer.code, answer.xml.findtext("Message")) == (
        "InvalidAccessKeyId",
        "the access key's user is disabled",
    )


def test_a_wrong_secret_of_a_known_key_is_a_wrong_signature(alice: Tenant, filled: str) -> None:
    wrong = Credentials(alice.key.access_key, "another-secret")
    answer = call(alice.server, "GET", f"/{filled}/a/1", credentials=wrong)
    assert (answer.status, answer.code) == (403, "SignatureDoesNotMatch")


def test_a_scoped_key_narrows_its_owner(alice: Tenant, filled: str) -> None:
    narrow = alice.another_key(scope=(grant(filled, READ, prefix="a/"),))
    assert narrow.call("GET", f"/{filled}/a/1").status == 200
    assert keys_of(narrow, filled, "a/") == ["a/1", "a/2"]
    for method, path in (
        ("GET", "/b/1"),
        ("PUT", "/a/1"),
        ("DELETE", ""),
        ("GET", "?list-type=2"),
    ):
        assert narrow.call(method, f"/{filled}{path}").status == 403, (method, path)
    assert narrow.call("PUT", "/another-bucket-of-mine").status == 403
    assert narrow.call("GET", "/another-bucket-of-mine").code == "AccessDenied"


def test_a_user_who_owns_buckets_cannot_be_deleted(alice: Tenant, filled: str) -> None:
    with pytest.raises(Conflict, match=filled):
        alice.delete()
    for key in ("a/1", "a/2", "b/1"):
        alice.call("DELETE", f"/{filled}/{key}")
    assert alice.call("DELETE", f"/{filled}").status == 204
    alice.delete()
    assert alice.call("GET", "/").code == "InvalidAccessKeyId"


# --- before the body, and while the storage server is away ----------------------------------------


def test_a_client_that_waits_is_refused_before_it_sends_its_body(bob: Tenant, filled: str) -> None:
    for path in (f"/{filled}/a/1", "/nobody-has-this-bucket/key"):
        named = signed_headers(
            bob.server,
            "PUT",
            path,
            headers={"Expect": "100-continue", "Content-Length": "1000000"},
            payload_hash="UNSIGNED-PAYLOAD",
            credentials=bob.credentials,
        )
        with open_socket(bob.server) as connection:
            send_head(connection, "PUT", path, named)
            answer = receive_answer(connection, "PUT")
        assert answer.status in (403, 404)
        assert answer.code in ("AccessDenied", "NoSuchBucket")


def test_buckets_change_hands_without_a_moment_of_the_old_owner(alice: Tenant, bob: Tenant) -> None:
    name = alice.new_bucket()
    for _ in range(10):
        assert alice.call("PUT", f"/{name}/key", b"hers").status == 200
        assert alice.call("DELETE", f"/{name}/key").status == 204
        assert alice.call("DELETE", f"/{name}").status == 204
        assert bob.call("PUT", f"/{name}").status == 200
        assert bob.call("PUT", f"/{name}/key", b"his").status == 200
        assert bob.call("DELETE", f"/{name}/key").status == 204
        assert bob.call("DELETE", f"/{name}").status == 204
        assert alice.call("PUT", f"/{name}").status == 200
