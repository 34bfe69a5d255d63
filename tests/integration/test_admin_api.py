"""The admin API over HTTP, against a storage server and an admin server as processes."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from objectcache.channel.access_key import SigningKey
from objectcache.channel.endpoint import Endpoint
from objectcache.channel.requests import GatewayRequest
from objectcache.channel.signing import Signer
from objectcache_gateway.admin.serving.admin_connections import CONNECTIONS_MAX
from objectcache_schemas.errors import Unavailable
from objectcache_schemas.messages.buckets import CreateBucket, DeleteBucket
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.messages.quotas import CheckPut
from objectcache_schemas.messages.reads import Object, ObjectOpened, OpenObject, StatObject
from objectcache_schemas.messages.uploads import CreateUpload
from objectcache_schemas.messages.writes import DeleteObjects
from objectcache_schemas.operators.account_changes import Directory, WatchDirectory
from objectcache_schemas.operators.admin_api import SIGNING_SERVICE
from objectcache_schemas.records import ObjectAttributes
from tests.admin_server import AdminServed

SECRET = "a-secret-that-nobody-logs"
PASSPHRASE = "correct horse battery"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminServed]:
    with AdminServed(tmp_path_factory.mktemp("admin") / "data") as running:
        yield running
        assert running.api.terminate() == 0


def signed(
    served: AdminServed,
    method: str,
    path: str,
    body: bytes = b"",
    secret: str | None = None,
    service: str = SIGNING_SERVICE,
) -> dict[str, str]:
    """Headers of a request that the root key signs, or somebody with another secret."""
    access_key, secret_key = served.root_key
    key = SigningKey(access_key, secret or secret_key)
    signer = Signer(Endpoint.parse(served.url), "eu-central-1", lambda: key, service)
    path, _, query = path.partition("?")
    return signer.signed_headers(GatewayRequest(method, path, query, {}, (body,)))


def directory(served: AdminServed) -> Directory:
    """What gateways see."""
    with served.connect() as client:
        asked = WatchDirectory(known_version=0, known_buckets_version=0, timeout_s=0.0)
        return client.ask(asked, Directory)


# --- who asks -------------------------------------------------------------------------------------


def test_liveness_alone_needs_no_credentials(served: AdminServed) -> None:
    assert served.ask_tcp("GET", "/healthz", {}).document == {"status": "ok"}
    for path in ("/v1/users", "/v1/health", "/openapi.json", "/metrics"):
        refused = served.ask_tcp("GET", path, {})
        assert (refused.status, refused.code) == (401, "Unauthorized"), path
        assert refused.headers["www-authenticate"] == "Bearer"


def test_a_token_may_what_its_scopes_say(served: AdminServed) -> None:
    bearer = {"Authorization": f"Bearer {served.token('users:read')}"}
    assert served.ask_tcp("GET", "/v1/users", bearer).status == 200
    refused = served.ask_tcp("GET", "/v1/keys", bearer)
    assert (refused.status, refused.code) == (403, "AccessDenied")
    assert "keys:read" in refused.document["message"]
    assert served.ask_tcp("POST", "/v1/users", bearer, b'{"name": "eve"}').status == 403
    assert served.ask("GET", "/v1/users/eve").status == 404


@pytest.mark.parametrize("spoil", [lambda t: t[:-1], lambda t: "oct_x_y", lambda t: "", str.upper])
def test_a_token_that_is_not_one_is_refused_the_same_way(served: AdminServed, spoil: Any) -> None:
    bearer = {"Authorization": f"Bearer {spoil(served.token('admin'))}"}
    refused = served.ask_tcp("GET", "/v1/users", bearer)
    assert (refused.status, refused.document["message"]) == (
        401,
        "the token is not known, or has expired",
    )


def test_a_token_ends_when_it_is_deleted_and_when_its_time_is_over(served: AdminServed) -> None:
    made = served.ask("POST", "/v1/tokens", {"name": "short", "scopes": ["read"]}).document
    bearer = {"Authorization": f"Bearer {made['token']}"}
    assert served.ask_tcp("GET", "/v1/users", bearer).status == 200
    assert served.ask("DELETE", f"/v1/tokens/{made['view']['token_id']}").status == 204
    assert served.ask_tcp("GET", "/v1/users", bearer).status == 401
    moment = {"name": "over", "scopes": ["read"], "lifetime_s": 1e-6}
    over = served.ask("POST", "/v1/tokens", moment).document
    expired = {"Authorization": f"Bearer {over['token']}"}
    assert served.ask_tcp("GET", "/v1/users", expired).status == 401


def test_nobody_gives_a_scope_that_they_do_not_have(served: AdminServed) -> None:
    bearer = {"Authorization": f"Bearer {served.token('tokens:write', 'usage:read')}"}
    wanted = {"name": "more", "scopes": ["admin"]}
    refused = served.ask_tcp("POST", "/v1/tokens", bearer, json.dumps(wanted).encode())
    assert (refused.status, refused.code) == (403, "AccessDenied")
    same = {"name": "same", "scopes": ["usage:read", "tokens:read"]}
    assert served.ask_tcp("POST", "/v1/tokens", bearer, json.dumps(same).encode()).status == 201


def test_the_root_key_signs_requests_with_their_bodies(served: AdminServed) -> None:
    path = "/v1/users?limit=5&after=a%20b"
    assert served.ask_tcp("GET", path, signed(served, "GET", path)).status == 200
    body = b'{"name": "signed"}'
    headers = signed(served, "POST", "/v1/users", body)
    swapped = served.ask_tcp("POST", "/v1/users", headers, b'{"name": "sneaky"}')
    assert (swapped.status, swapped.document["message"]) == (
        401,
        "the body is not the one that was signed",
    )
    assert served.ask_tcp("POST", "/v1/users", headers, body).status == 201
    wrong = signed(served, "GET", path, secret="another-secret")
    assert served.ask_tcp("GET", path, wrong).status == 401


def test_a_signature_for_s3_is_not_good_here(served: AdminServed) -> None:
    refused = served.ask_tcp("GET", "/v1/users", signed(served, "GET", "/v1/users", service="s3"))
    assert refused.status == 401
    assert "must end with /objectcache-admin/aws4_request" in refused.document["message"]


def test_a_signer_that_is_not_s3s_signs_what_has_no_body(served: AdminServed) -> None:
    key = Credentials(*served.root_key)
    request = AWSRequest("GET", f"{served.url}/v1/users?limit=5&after=a%20b")
    SigV4Auth(key, SIGNING_SERVICE, "eu-central-1").add_auth(request)
    headers = dict(request.headers.items())
    assert "x-amz-content-sha256" not in {name.lower() for name in headers}
    assert served.ask_tcp("GET", "/v1/users?limit=5&after=a%20b", headers).status == 200
    refused = served.ask_tcp("GET", "/v1/users?limit=5&after=a%20b", headers, b"{}")
    assert refused.status == 401


def test_a_signature_that_leaves_the_body_out_is_refused(served: AdminServed) -> None:
    headers = signed(served, "GET", "/v1/users")
    headers["x-amz-content-sha256"] = "UNSIGNED-PAYLOAD"
    assert served.ask_tcp("GET", "/v1/users", headers).status == 401


def test_a_users_key_does_not_open_the_admin_api(served: AdminServed) -> None:
    made = served.ask("POST", "/v1/users", {"name": "plain"}).document["key"]
    key = SigningKey(made["access_key"], made["secret_key"])
    signer = Signer(Endpoint.parse(served.url), "us-east-1", lambda: key, SIGNING_SERVICE)
    refused = served.ask_tcp(
        "GET", "/v1/users", signer.signed_headers(GatewayRequest("GET", "/v1/users"))
    )
    assert refused.status == 401
    assert "root key only" in refused.document["message"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_the_socket_is_for_the_servers_own_user(served: AdminServed) -> None:
    assert served.socket_path.stat().st_mode & 0o777 == 0o600
    os.seteuid(65534)
    try:
        with pytest.raises(PermissionError):
            served.ask("GET", "/v1/users")
    finally:
        os.seteuid(0)


# --- users and keys -------------------------------------------------------------------------------


def test_a_user_is_made_with_its_pair_and_known_to_gateways_at_once(served: AdminServed) -> None:
    body = {"name": "alice", "access_key": "AKALICE", "secret_key": SECRET}
    made = served.ask("POST", "/v1/users", body)
    assert made.status == 201
    assert made.document["key"]["secret_key"] == SECRET
    seen = directory(served)
    assert {key.access_key: key.secret_key for key in seen.keys}["AKALICE"] == SECRET
    again = served.ask("POST", "/v1/users", body)
    assert again.status == 409
    assert served.ask("GET", "/v1/users/alice").document["key_count"] == 1


@pytest.mark.parametrize("name", ["bad name", "..", "anonymous", "root"])
def test_a_users_name_is_refused_in_words(served: AdminServed, name: str) -> None:
    refused = served.ask("POST", "/v1/users", {"name": name})
    assert refused.status == 400
    assert "[A-Z" not in refused.document["message"]
    assert repr(name) in refused.document["message"]


def test_the_log_says_why_credentials_were_refused_and_not_which(served: AdminServed) -> None:
    token = served.token("users:read")
    wrong = f"{token[:-4]}AAAA"
    for sent in (token, wrong, "oct_unknown_secret"):
        bearer = {"Authorization": f"Bearer {sent}"}
        assert served.ask_tcp("PUT", "/v1/drain", bearer, b'{"draining": true}').status in (
            401,
            403,
        )
    log = (served.data_dir / "admin.log").read_text("utf-8")
    assert "lacks the scope server:write" in log
    assert "the secret of token test" in log
    assert "the token is not known" in log
    assert token[-20:] not in log
    assert "AAAA" not in log
    assert "unknown_secret" not in log


def test_an_audit_log_on_a_full_device_stops_no_change_and_is_counted(tmp_path: Path) -> None:
    with AdminServed(tmp_path / "data", "admin.audit_log=/dev/full") as full:
        assert full.ask("GET", "/v1/health").document["audit_lines_lost"] == 0
        for number in (1, 2):
            assert full.ask("POST", "/v1/users", {"name": f"user{number}"}).status == 201
        assert full.ask("GET", "/v1/health").document["audit_lines_lost"] == 2
        page = full.ask("GET", "/metrics").body.decode()
        assert 'objectcache_admin_audit_lines_lost_total{process="admin"} 2.0' in page
        assert "2 lines lost" in full.admin("health").output
        log = (full.data_dir / "admin.log").read_text("utf-8")
        assert "/dev/full cannot be written: No space left on device; 2 lines are lost" in log


def test_a_user_whose_key_is_refused_is_not_made(served: AdminServed) -> None:
    served.ask("POST", "/v1/users", {"name": "first", "access_key": "AKTAKEN"})
    refused = served.ask("POST", "/v1/users", {"name": "second", "access_key": "AKTAKEN"})
    assert refused.status == 409
    assert served.ask("GET", "/v1/users/second").status == 404


def test_a_user_changes_where_it_is_told(served: AdminServed) -> None:
    served.ask("POST", "/v1/users", {"name": "carol", "with_key": False})
    off = served.ask("PATCH", "/v1/users/carol", {"enabled": False}).document
    assert (off["enabled"], off["may_create_buckets"], off["key_count"]) == (False, True, 0)
    limits = {"stored_bytes": 10, "deliveries": 2}
    assert served.ask("PATCH", "/v1/users/carol/quota", limits).document == limits
    less = served.ask("PATCH", "/v1/users/carol/quota", {"deliveries": None})
    assert less.document == {"stored_bytes": 10}
    given = {"bucket": "shared", "access": ["read", "write"], "prefix": "p/"}
    refused = served.ask("POST", "/v1/users/carol/grants", given)
    assert (refused.status, refused.code) == (404, "NoSuchBucket")
    assert served.ask("POST", "/v1/buckets", {"name": "shared", "owner": "root"}).status == 201
    assert served.ask("POST", "/v1/users/carol/grants", given).status == 200
    query = "/v1/users/carol/grants?bucket=shared&prefix=p%2F&access=write"
    (left,) = served.ask("DELETE", query).document["grants"]
    assert left.pop("bucket_created_s") > 0
    assert left == {**given, "access": ["read"]}
    assert served.ask("DELETE", query).status == 404
    user = next(user for user in directory(served).users if user.name == "carol")
    assert (user.enabled, user.quota.stored_bytes, len(user.grants)) == (False, 10, 1)
    assert served.ask("DELETE", "/v1/users/carol").status == 204
    assert served.ask("DELETE", "/v1/users/carol").status == 404


def test_a_key_is_rotated_with_overlap(served: AdminServed) -> None:
    served.ask("POST", "/v1/users", {"name": "dora", "access_key": "AKDORA"})
    scope = [{"bucket": "models", "access": ["read"]}]
    body = {"user": "dora", "access_key": "AKSCOPED", "scope": scope, "note": "ci"}
    assert served.ask("POST", "/v1/keys", body).status == 201
    rotated = served.ask("POST", "/v1/keys/AKSCOPED/rotation", {"overlap_s": 60}).document
    new = served.ask("GET", f"/v1/keys/{rotated['key']['access_key']}").document
    assert (new["scope"], new["note"], new["expires_s"]) == (scope, "ci", None)
    old = served.ask("GET", "/v1/keys/AKSCOPED").document
    assert old["expires_s"] == pytest.approx(new["created_s"] + 60)
    assert "secret_key" not in old
    listed = served.ask("GET", "/v1/keys?user=dora").document["keys"]
    assert len(listed) == 3
    assert served.ask("PATCH", "/v1/keys/AKDORA", {"enabled": False}).document["enabled"] is False
    assert served.ask("DELETE", "/v1/keys/AKDORA").status == 204
    assert served.ask("GET", "/v1/keys/AKDORA").status == 404
    assert served.ask("POST", "/v1/keys", {"user": "nobody"}).status == 404


def test_a_rotated_key_ends_when_the_old_one_would_have_unless_told_otherwise(
    served: AdminServed,
) -> None:
    served.ask("POST", "/v1/users", {"name": "dina", "with_key": False})

    def rotated_expiry(lifetime_s: float | None, rotation: dict[str, Any]) -> tuple[Any, Any]:
        """When the old key would have ended, and when the new one does."""
        body = {"user": "dina", "lifetime_s": lifetime_s}
        made = served.ask("POST", "/v1/keys", body).document
        path = f"/v1/keys/{made['access_key']}/rotation"
        pair = served.ask("POST", path, {"overlap_s": 60, **rotation}).document["key"]
        new = served.ask("GET", f"/v1/keys/{pair['access_key']}").document
        assert new["expires_s"] == pair["expires_s"]
        return made["expires_s"], new["expires_s"]

    would_end, ends = rotated_expiry(3600, {})
    assert ends == would_end
    assert rotated_expiry(None, {}) == (None, None)
    would_end, ends = rotated_expiry(3600, {"lifetime_s": 7200})
    assert ends == pytest.approx(would_end + 3600, abs=30)
    assert rotated_expiry(3600, {"lifetime_s": None})[1] is None
    assert rotated_expiry(None, {"lifetime_s": 7200})[1] is not None


def test_an_expired_key_is_rotated_only_with_a_lifetime(served: AdminServed) -> None:
    served.ask("POST", "/v1/users", {"name": "dino", "with_key": False})
    body = {"user": "dino", "access_key": "AKOVER", "lifetime_s": 1e-6}
    assert served.ask("POST", "/v1/keys", body).status == 201
    refused = served.ask("POST", "/v1/keys/AKOVER/rotation", {})
    assert (refused.status, refused.code) == (400, "InvalidArgument")
    assert "lifetime_s" in refused.document["message"]
    rotated = served.ask("POST", "/v1/keys/AKOVER/rotation", {"lifetime_s": 60})
    assert rotated.status == 201
    key = rotated.document
    assert key["key"]["expires_s"] > key["old"]["expires_s"]


def test_lists_come_in_pages(served: AdminServed) -> None:
    for name in ("page-a", "page-b", "page-c"):
        served.ask("POST", "/v1/users", {"name": name, "with_key": False})
    first = served.ask("GET", "/v1/users?after=page-&limit=2").document
    assert [user["name"] for user in first["users"]] == ["page-a", "page-b"]
    assert first["next_after"] == "page-b"
    rest = served.ask("GET", "/v1/users?after=page-b&limit=1000").document
    assert rest["users"][0]["name"] == "page-c"
    assert rest["next_after"] is None


# --- buckets --------------------------------------------------------------------------------------

LAYOUT = {
    "num_layers": 4, "chunk_tokens": 16, "per_layer_chunk_bytes": 4096, "dtype": "bf16",
    "fingerprint": "m1",
}  # fmt: skip


def test_a_bucket_is_made_for_a_user_with_all_that_is_chosen(served: AdminServed) -> None:
    served.ask("POST", "/v1/users", {"name": "owner", "with_key": False})
    body = {"name": "kv-1", "owner": "owner", "layout": LAYOUT, "etag_mode": "opaque"}
    made = served.ask("POST", "/v1/buckets", {**body, "quota": {"object_count": 5}})
    assert made.status == 201
    shown = served.ask("GET", "/v1/buckets/kv-1").document
    assert shown == made.document
    assert (shown["owner"], shown["layout"]["num_layers"]) == ("owner", 4)
    assert shown["configuration"] == {"etag_mode": "opaque", "quota": {"object_count": 5}}
    owned = served.ask("DELETE", "/v1/users/owner")
    assert owned.status == 409
    assert "kv-1" in owned.document["message"]
    changed = served.ask("PATCH", "/v1/buckets/kv-1/configuration", {"etag_mode": "md5"}).document
    assert changed == {"quota": {"object_count": 5}}
    assert served.ask("PATCH", "/v1/buckets/kv-1/policy", {"ttl_s": 60}).document == {"ttl_s": 60.0}
    assert served.ask("DELETE", "/v1/buckets/kv-1").status == 204
    assert served.ask("DELETE", "/v1/users/owner").status == 204


def test_a_bucket_that_is_refused_is_not_made(served: AdminServed) -> None:
    wrong = {**LAYOUT, "num_layers": 0}
    refused = served.ask("POST", "/v1/buckets", {"name": "wrong", "layout": wrong})
    assert refused.status == 400
    assert "num_layers" in refused.document["message"]
    assert served.ask("GET", "/v1/buckets/wrong").status == 404
    assert (
        served.ask("POST", "/v1/buckets", {"name": "xyz", "owner": "none"}).code == "NoSuchEntity"
    )
    assert served.ask("POST", "/v1/buckets", {"name": "Not_A_Bucket"}).status == 400


def test_a_bucket_that_holds_objects_is_not_deleted_and_its_usage_is_told(
    served: AdminServed,
) -> None:
    served.ask("POST", "/v1/buckets", {"name": "full"})
    with served.connect() as client:
        client.put("full", "key", b"x" * 1000)
    assert served.ask("DELETE", "/v1/buckets/full").code == "BucketNotEmpty"
    usage = served.ask("GET", "/v1/usage?bucket=full").document
    (bucket,) = usage["buckets"]
    assert (bucket["object_count"], bucket["stored_bytes"]) == (1, 1000)
    assert usage["users"][0]["user"] == "root"
    pins = served.ask("POST", "/v1/buckets/full/pins", {"keys": ["key", "no"], "pinned": True})
    assert pins.document == {"count": 1}


# --- the server -----------------------------------------------------------------------------------


def test_a_drained_server_takes_no_delivery_until_it_is_undrained(served: AdminServed) -> None:
    served.ask("POST", "/v1/buckets", {"name": "drained"})
    with served.connect() as client:
        client.put("drained", "key", b"x")
    try:
        drained = served.ask("PUT", "/v1/drain", {"draining": True}).document
        assert (drained["status"], drained["draining"]) == ("draining", True)
        assert served.ask("GET", "/v1/health").document["status"] == "draining"
        with served.connect() as client, pytest.raises(Unavailable, match="drained") as caught:
            client.put("drained", "other", b"x")
        assert caught.value.details.retry_after_s is not None
        with served.connect() as client, pytest.raises(Unavailable, match="drained"):
            client.ask(OpenObject(bucket="drained", key="key"), ObjectOpened)
        for change in (
            CreateBucket(name="later", owner="root", region="us-east-1"),
            DeleteBucket(name="drained"),
            DeleteObjects(bucket="drained", keys=("key",)),
            CreateUpload(bucket="drained", key="key", attributes=ObjectAttributes()),
            CheckPut(bucket="drained", identity="root", size_bytes=1),
        ):
            with served.connect() as client, pytest.raises(Unavailable, match="drained"):
                client.ask(change, Done)
        with served.connect() as client:  # what changes nothing goes on
            assert client.ask(StatObject(bucket="drained", key="key"), Object).info.size_bytes == 1
        assert served.ask("GET", "/v1/buckets/drained").status == 200
        assert served.ask("POST", "/v1/users", {"name": "drain-ops"}).status == 201
    finally:
        back = served.ask("PUT", "/v1/drain", {"draining": False}).document
    assert back["status"] == "ok"
    with served.connect() as client:
        client.put("drained", "other", b"x")
    assert {one["process"]: one["ok"] for one in back["processes"]} == {
        "admin": True,
        "storage": True,
        "gateway-0": False,  # none runs here
    }


def test_what_is_logged_changes_at_run_time(served: AdminServed) -> None:
    assert "POST /v1/log-level" not in served.api.log_tail()
    told = served.ask("PUT", "/v1/log-level", {"level": "debug", "process": "admin"}).document
    assert told["processes"] == [{"process": "admin", "ok": True}]
    served.ask("GET", "/v1/usage")
    assert "GET /v1/usage 200" in served.api.log_tail()
    assert served.ask("PUT", "/v1/log-level", {"level": "info"}).status == 200
    assert served.ask("PUT", "/v1/log-level", {"level": "loud"}).status == 400
    wrong = served.ask("PUT", "/v1/log-level", {"level": "info", "process": "gateway-9"})
    assert "gateway-9" in wrong.document["message"]


def test_the_schedule_changes_and_deliveries_are_told(served: AdminServed) -> None:
    changed = served.ask("PATCH", "/v1/schedule", {"changes": {"cap_gbps": 7}}).document
    assert changed["configuration"]["cap_gbps"] == 7
    assert served.ask("GET", "/v1/schedule").document["changes"] == {"cap_gbps": 7.0}
    reset = served.ask("PATCH", "/v1/schedule", {"reset": True}).document
    assert reset["changes"] == {}
    deliveries = served.ask("GET", "/v1/deliveries").document
    assert (deliveries["deliveries"], deliveries["delivery_count"]) == ([], 0)
    assert served.ask("GET", "/v1/traces").document == {"traces": []}
    assert served.ask("GET", "/v1/traces/none").status == 404


def test_a_check_says_each_step_on_a_line(served: AdminServed) -> None:
    answer = served.ask("POST", "/v1/checks", {"repair": False})
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in answer.body.splitlines()]
    assert [line.get("ended", False) for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1]["report"]["damaged"] == 0


# --- wrong input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "word"),
    [
        ("POST", "/v1/users", b"", 400, "body"),
        ("POST", "/v1/users", b"{", 400, "body"),
        ("POST", "/v1/users", b"[]", 400, "object"),
        ("POST", "/v1/users", b'{"name": "x", "extra": 1}', 400, "extra"),
        ("POST", "/v1/users", b'{"name": "a/b"}', 400, "name"),
        ("POST", "/v1/users", b'{"name": "\xff"}', 400, "body"),
        ("POST", "/v1/users", b"[" * 100_000, 400, "body"),
        ("POST", "/v1/buckets", b'{"name": "\\ud800bucket"}', 400, ""),
        ("PATCH", "/v1/users/x/quota", b'{"stored_bytes": -1}', 400, "stored_bytes"),
        ("PATCH", "/v1/users/x/quota", b'{"stored_bytes": 1e400}', 400, "stored_bytes"),
        ("PATCH", "/v1/users/x/quota", b'{"stored_bytes": 99999999999999999999}', 400, ""),
        ("GET", "/v1/users?limit=0", b"", 400, "limit"),
        ("GET", "/v1/users?limit=1001", b"", 400, "limit"),
        ("GET", "/v1/users?limit=1&limit=2", b"", 400, "twice"),
        ("GET", "/v1/users?colour=red", b"", 400, "colour"),
        ("GET", "/v1/users", b"{}", 400, "no body"),
        ("GET", "/v1/users/no%2Fbody", b"", 404, "no/body"),
        ("GET", "/v1/users/%FF", b"", 404, ""),
        ("GET", "/v1/buckets/%00", b"", 404, ""),
        ("GET", "/v1/colours", b"", 404, "/openapi.json"),
        ("DELETE", "/v1/users", b"", 405, "DELETE"),
        ("POST", "/v1/tokens", b'{"name": "x", "scopes": ["root"]}', 400, "'root' is no scope"),
        ("POST", "/v1/tokens", b'{"name": "x", "scopes": []}', 400, "scopes"),
    ],
)
def test_what_is_wrong_is_refused_as_json_that_names_it(
    served: AdminServed, method: str, path: str, body: bytes, status: int, word: str
) -> None:
    refused = served.ask(method, path, data=body)
    assert refused.status == status, refused
    assert set(refused.document) == {"code", "message"}
    assert word in refused.document["message"]
    assert refused.headers["x-objectcache-admin-api"] == "1"


def test_a_body_over_the_bound_is_refused(served: AdminServed) -> None:
    refused = served.ask("POST", "/v1/users", data=b" " * (1 << 20) + b"{}")
    assert (refused.status, refused.code) == (400, "EntityTooLarge")
    assert served.ask("GET", "/healthz").status == 200


@pytest.mark.parametrize(
    "head",
    [
        b"\x16\x03\x01 oct_not_http\r\n\r\n",
        b"GET /v1/users HTTP/1.1\r\nAuthorization Bearer oct_no_colon\r\n\r\n",
        b"GET /v1/users HTTP/1.1\r\nAuthorization: oct_" + b"x" * 20_000 + b"\r\n\r\n",
        b"GET /v1/users HTTP/1.1\r\nContent-Length: oct_1\r\n\r\n",
    ],
)
def test_what_cannot_be_read_is_refused_as_json_without_a_byte_of_it(
    served: AdminServed, head: bytes
) -> None:
    place = urlsplit(served.url)
    with socket.create_connection((str(place.hostname), place.port or 0), 20) as connected:
        connected.sendall(head)
        response = http.client.HTTPResponse(connected)
        response.begin()
        body = response.read()
        assert connected.recv(1) == b"", "the connection is at no known place and must end"
    assert response.status == 400
    assert response.headers["Content-Type"].startswith("application/json")
    assert response.headers["Server"] == "ObjectCache-admin"
    problem = json.loads(body)
    assert problem["code"] == "InvalidRequest"
    assert "16384 bytes" in problem["message"]
    assert "oct_" not in problem["message"]
    log = (served.data_dir / "admin.log").read_text("utf-8")
    assert "unreadable request" in log
    assert "oct_" not in log
    assert served.ask("GET", "/healthz").status == 200


def test_strangers_on_tcp_lock_nobody_out(served: AdminServed) -> None:
    place = urlsplit(served.url)
    address = (str(place.hostname), place.port or 0)
    bearer = {"Authorization": f"Bearer {served.token('users:read')}"}
    known = http.client.HTTPConnection(*address, timeout=20)
    with contextlib.ExitStack() as held:
        held.callback(known.close)
        known.request("GET", "/v1/users", headers=bearer)
        assert known.getresponse().read()
        idle = [
            held.enter_context(socket.create_connection(address, 20))
            for _ in range(CONNECTIONS_MAX + 10)
        ]
        assert served.ask_tcp("GET", "/v1/users", bearer).status == 200  # in a stranger's place
        assert idle[0].recv(1) == b""  # the oldest went
        assert served.ask("GET", "/v1/users").status == 200  # the unix socket has its own bound
        known.request("GET", "/v1/users", headers=bearer)
        assert known.getresponse().status == 200  # it has shown a token, and is older than they are


# --- the document, the metrics, the audit log -----------------------------------------------------


def test_the_document_is_served_to_whoever_has_credentials(served: AdminServed) -> None:
    bearer = {"Authorization": f"Bearer {served.token('metrics:read')}"}
    document = served.ask_tcp("GET", "/openapi.json", bearer).document
    assert document["openapi"] == "3.1.0"
    assert "/v1/users/{name}/quota" in document["paths"]


def test_every_change_is_in_the_audit_log_and_no_secret_is(served: AdminServed) -> None:
    token = served.token("users:write")
    bearer = {"Authorization": f"Bearer {token}"}
    body = json.dumps({"name": "audited", "secret_key": SECRET + "-audited"}).encode()
    assert served.ask_tcp("POST", "/v1/users", bearer, body).status == 201
    assert served.ask_tcp("POST", "/v1/buckets", bearer, b'{"name": "b"}').status == 403
    lines = served.audit_lines[-2:]
    assert [(line["action"], line["status"]) for line in lines] == [
        ("POST /v1/users", 201),
        ("POST /v1/buckets", 403),
    ]
    assert lines[0]["who"].startswith("token test (")
    assert lines[0]["from"] == "127.0.0.1"
    assert lines[0]["asked"]["name"] == "audited"
    made = served.ask("POST", "/v1/keys", {"user": "audited"}).document
    served.ask("POST", "/v1/backup", {"passphrase": PASSPHRASE})
    kept = (served.data_dir / "admin-audit.log").read_text()
    logged = (served.data_dir / "admin.log").read_text() + served.storage.log_tail()
    for secret in (SECRET, token, token.split("_", 2)[2], made["secret_key"], PASSPHRASE):
        assert secret not in kept
        assert secret not in logged
    assert (served.data_dir / "admin-audit.log").stat().st_mode & 0o777 == 0o600


# --- backup ---------------------------------------------------------------------------------------


def test_a_backup_brings_everything_back_into_an_empty_server(
    served: AdminServed, tmp_path: Path
) -> None:
    served.ask("POST", "/v1/users", {"name": "kept", "access_key": "AKKEPT", "secret_key": SECRET})
    served.ask("POST", "/v1/buckets", {"name": "kept-kv", "owner": "kept", "layout": LAYOUT})
    on_kept = {"bucket": "kept-kv", "access": ["read"]}
    served.ask("POST", "/v1/users", {"name": "reader", "grants": [on_kept], "with_key": False})
    policy = {"durability": "async", "encoding": "planes-zstd"}
    served.ask("PATCH", "/v1/buckets/kept-kv/policy", policy)
    served.ask("PATCH", "/v1/schedule", {"changes": {"margin_gbps": 9}})
    token = served.token("users:read")
    made = served.ask("POST", "/v1/backup", {"passphrase": PASSPHRASE})
    assert made.status == 200
    assert SECRET.encode() not in made.body
    assert base64.b64encode(SECRET.encode()) not in made.body
    backup = made.document
    with AdminServed(tmp_path / "other") as other:
        wrong = other.ask("POST", "/v1/restore", {"passphrase": "wrong horse", "backup": backup})
        assert (wrong.status, wrong.code) == (403, "AccessDenied")
        forged = json.loads(made.body)
        next(bucket for bucket in forged["content"]["buckets"] if bucket["name"] == "kept-kv")[
            "owner"
        ] = "root"
        asked = {"passphrase": PASSPHRASE, "backup": forged}
        assert other.ask("POST", "/v1/restore", asked).status == 403
        assert other.ask("GET", "/v1/users").document["users"] == []
        asked = {"passphrase": PASSPHRASE, "backup": backup}
        done = other.ask("POST", "/v1/restore", asked)
        assert done.status == 200, done
        assert done.document["buckets_created"] == len(backup["content"]["buckets"])
        bucket = other.ask("GET", "/v1/buckets/kept-kv").document
        assert (bucket["owner"], bucket["policy"]) == ("kept", policy)
        assert bucket["layout"]["fingerprint"] == "m1"
        (grant,) = other.ask("GET", "/v1/users/reader/grants").document["grants"]
        assert grant["bucket_created_s"] == bucket["created_s"]  # that of the bucket made here
        keys = {key.access_key: key.secret_key for key in directory(other).keys}
        assert keys["AKKEPT"] == SECRET
        assert other.ask("GET", "/v1/schedule").document["changes"] == {"margin_gbps": 9.0}
        bearer = {"Authorization": f"Bearer {token}"}
        assert other.ask_tcp("GET", "/v1/users", bearer).status == 200
        again = other.ask("POST", "/v1/restore", asked)
        assert again.status == 409
        assert "replace" in again.document["message"]
        other.ask("PATCH", "/v1/buckets/kept-kv/policy", {"durability": "sync"})
        other.ask("POST", "/v1/users", {"name": "extra"})
        replaced = other.ask("POST", "/v1/restore", {**asked, "replace": True})
        assert replaced.status == 200, replaced
        assert other.ask("GET", "/v1/users/extra").status == 404
        bucket = other.ask("GET", "/v1/buckets/kept-kv").document
        assert bucket["policy"] == policy
    served.ask("PATCH", "/v1/schedule", {"reset": True})


def test_accounts_outlive_a_restart_of_both(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    with AdminServed(data_dir) as first:
        first.ask("POST", "/v1/users", {"name": "alice", "access_key": "AKALICE"})
        token = first.token("read")
    with AdminServed(data_dir) as second:
        assert second.ask("GET", "/v1/keys/AKALICE").document["user"] == "alice"
        bearer = {"Authorization": f"Bearer {token}"}
        assert second.ask_tcp("GET", "/v1/users", bearer).status == 200


def test_without_a_storage_server_it_says_so_and_still_knows_its_tokens(tmp_path: Path) -> None:
    with AdminServed(tmp_path / "data") as served:
        bearer = {"Authorization": f"Bearer {served.token('read')}"}
        assert served.ask_tcp("GET", "/v1/health", bearer).status == 200
        assert served.storage.terminate() == 0
        health = served.ask_tcp("GET", "/v1/health", bearer)
        assert (health.status, health.document["status"]) == (200, "unavailable")
        refused = served.ask_tcp("GET", "/v1/users", bearer)
        assert (refused.status, refused.code) == (503, "ServiceUnavailable")
        assert served.ask_tcp("GET", "/healthz", {}).status == 200
