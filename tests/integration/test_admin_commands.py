"""`objectcache admin` over the admin API: users, keys, tokens, buckets, quotas, backups."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from objectcache_operations.admin import name_arguments
from objectcache_operations.console.app import app
from objectcache_schemas.errors import StorageFull
from objectcache_schemas.limits import MIB
from tests.admin_server import AdminServed
from tests.certificates import Authority
from tests.integration.served import BOUND_S
from tests.storage_client import StorageClient

SECRET = "a-secret-from-a-vault"
PASSPHRASE = "correct horse battery"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminServed]:
    with AdminServed(tmp_path_factory.mktemp("admin") / "data") as running:
        yield running


@pytest.fixture(autouse=True)
def _no_settings_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OBJECTCACHE")]:
        monkeypatch.delenv(name)


def admin(*arguments: str) -> Result:
    """A command whose arguments say where the server is."""
    return CliRunner().invoke(app, ["admin", *arguments])


def refused(result: Result) -> str:
    """The one line of a command that failed."""
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert len(result.stderr.splitlines()) == 1
    return result.stderr


# --- users and keys -------------------------------------------------------------------------------


def test_a_user_is_added_with_a_pair_that_is_given_or_made_up(served: AdminServed) -> None:
    printed = served.printed(
        "user", "add", "alice", "--access-key", "AKALICE", "--secret-key", SECRET
    )
    assert "access key  AKALICE\n" in printed
    assert f"secret key  {SECRET}\n" in printed
    made_up = served.document("user", "add", "bob")["key"]
    assert made_up["access_key"].startswith("OC")
    assert len(made_up["secret_key"]) == 40
    assert served.document("user", "add", "keyless", "--no-key")["key"] is None
    assert "exists" in refused(served.admin("user", "add", "alice"))


def test_a_secret_comes_from_standard_input_so_that_no_list_of_processes_shows_it(
    served: AdminServed,
) -> None:
    flags = ("--access-key", "AKSTDIN", "--secret-key", "-")
    result = served.admin("user", "add", "quiet", *flags, text="from-standard-input\n")
    assert "secret key  from-standard-input" in result.stdout
    empty = served.admin("key", "add", "quiet", "--secret-key", "-", text="")
    assert "standard input is empty" in refused(empty)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("user", "add", "a b"), "name"),
        (("user", "add", "x", "--secret-key", "short"), "secret_key"),
        (("user", "add", "x", "--no-key", "--access-key", "AKX"), "`with_key` is false"),
        (("user", "add", "x", "--grant", "models"), "is not BUCKET"),
        (("user", "show", "nobody"), "there is no user 'nobody'"),
        (("user", "remove", "nobody"), "there is no user 'nobody'"),
        (("key", "add", "nobody"), "there is no user 'nobody'"),
        (("key", "rotate", "AKNONE"), "there is no access key 'AKNONE'"),
        (("key", "rotate", "AKNONE", "--overlap", "soon"), "'soon' is not a number"),
        (("key", "rotate", "AKNONE", "--expires", "late"), "'late' is not a number"),
        (("grant", "add", "nobody", "models", "all"), "'all' is no access"),
        (("token", "create", "x", "--scope", "root"), "'root' is no scope"),
        (("token", "remove", "none"), "there is no token 'none'"),
        (("bucket", "show", "none"), "bucket 'none' does not exist"),
        (("bucket", "create", "kv", "--layers", "4"), "a KV layout needs"),
        (("bucket", "etag", "none", "sha1"), "'sha1' is no ETag mode"),
        (("quota", "show"), "give --user USER or --bucket BUCKET"),
        (("quota", "set", "--user", "a", "--bucket", "b", "--objects", "1"), "one of the two"),
        (("quota", "set", "--user", "nobody"), "nothing to set"),
        (("log-level", "loud"), "give a level of debug, info, warning, error"),
    ],
)
def test_what_is_wrong_is_one_line_that_names_it(
    served: AdminServed, arguments: tuple[str, ...], words: str
) -> None:
    assert words in refused(served.admin(*arguments))


def test_a_user_is_listed_shown_disabled_and_removed(served: AdminServed) -> None:
    served.printed("bucket", "create", "shared", "--owner", "root")
    served.printed("user", "add", "carol", "--grant", "shared/p/=read,write", "--no-buckets")
    assert "carol" in served.printed("user", "list")
    assert served.printed("user", "disable", "carol") == "user carol is disabled\n"
    shown = served.printed("user", "show", "carol")
    assert "disabled, may not make buckets" in shown
    assert "shared/p/=read,write" in shown
    served.printed("user", "enable", "carol")
    document = served.document("user", "show", "carol")
    assert document["user"]["enabled"] is True
    assert len(document["keys"]) == 1
    assert "secret" not in json.dumps(document)
    served.printed("user", "remove", "carol")
    assert "carol" not in [user["name"] for user in served.document("user", "list")["users"]]


def test_a_key_has_a_scope_and_an_end_and_is_rotated(served: AdminServed) -> None:
    served.printed("user", "add", "dora", "--no-key")
    flags = ("--expires", "12h", "--scope", "models/ll/=read", "--note", "ci")
    made = served.document("key", "add", "dora", *flags)
    listed = served.document("key", "list", "--user", "dora")["keys"]
    (scope,) = listed[0]["scope"]
    assert (scope["bucket"], scope["access"], scope["prefix"]) == ("models", ["read"], "ll/")
    assert listed[0]["expires_s"] == pytest.approx(listed[0]["created_s"] + 12 * 3600)
    rotated = served.printed("key", "rotate", made["access_key"], "--overlap", "1h")
    assert f"{made['access_key']} ends at" in rotated
    old, new = sorted(
        served.document("key", "list", "--user", "dora")["keys"], key=lambda key: key["created_s"]
    )
    assert new["expires_s"] == listed[0]["expires_s"] > old["expires_s"]
    assert (new["scope"], new["note"]) == (old["scope"], "ci")
    served.printed("key", "disable", made["access_key"])
    assert "disabled" in served.printed("key", "list", "--user", "dora")
    served.printed("key", "enable", made["access_key"])
    served.printed("key", "remove", made["access_key"])
    assert len(served.document("key", "list", "--user", "dora")["keys"]) == 1
    again = served.document("key", "rotate", new["access_key"], "--expires", "none")
    assert again["key"]["expires_s"] is None
    for_days = served.document("key", "rotate", again["key"]["access_key"], "--expires", "7d")
    assert for_days["key"]["expires_s"] == pytest.approx(time.time() + 7 * 86_400, abs=60)


def test_access_is_given_and_taken(served: AdminServed) -> None:
    served.printed("user", "add", "frank")
    missing = served.admin("grant", "add", "frank", "models", "read")
    assert "there is no bucket 'models'" in refused(missing)
    served.printed("bucket", "create", "models", "--owner", "frank")
    assert served.printed("grant", "add", "frank", "models", "read", "write") == (
        "models=read,write\n"
    )
    served.printed("grant", "add", "frank", "models", "read", "--prefix", "x/")
    assert served.printed("grant", "remove", "frank", "models", "write") == (
        "models=read\nmodels/x/=read\n"
    )
    served.printed("grant", "remove", "frank", "models", "--prefix", "x/")
    (left,) = served.document("grant", "list", "frank")["grants"]
    assert (left["bucket"], left["access"], left["prefix"]) == ("models", ["read"], "")
    assert "no such grant" in refused(served.admin("grant", "remove", "frank", "other"))


# --- buckets and quotas ---------------------------------------------------------------------------


def test_a_bucket_is_made_looked_at_changed_and_removed(served: AdminServed) -> None:
    served.printed("user", "add", "owner")
    shape = ("--layers", "4", "--chunk-tokens", "16", "--slice-bytes", "4096")
    served.printed("bucket", "create", "llama", "--owner", "owner", *shape, "--fingerprint", "m1")
    assert "4 x 4,096 B, 16 tokens, bfloat16, m1" in served.printed("bucket", "show", "llama")
    listed = served.document("bucket", "list", "--user", "owner")["buckets"]
    assert [bucket["name"] for bucket in listed] == ["llama"]
    served.printed("bucket", "etag", "llama", "opaque")
    served.printed("bucket", "quota", "llama", "--stored", "10GiB", "--objects", "5")
    shown = served.document("bucket", "show", "llama")
    assert shown["configuration"]["etag_mode"] == "opaque"
    assert shown["configuration"]["quota"]["object_count"] == 5
    assert "llama" in refused(served.admin("user", "remove", "owner"))
    served.printed("bucket", "remove", "llama")
    assert "does not exist" in refused(served.admin("bucket", "remove", "llama"))


def test_a_quota_is_set_and_shown_beside_what_is_used(served: AdminServed) -> None:
    served.printed("user", "add", "greta")
    served.printed("bucket", "create", "greta-bucket", "--owner", "greta")
    flags = ("--stored", "1MiB", "--requests", "100", "--deliveries", "2")
    assert "requests      100/s" in served.printed("quota", "set", "--user", "greta", *flags)
    served.printed("quota", "set", "--user", "greta", "--requests", "none")
    assert served.document("quota", "show", "--user", "greta") == {
        "stored_bytes": 1 << 20,
        "object_count": None,
        "requests_per_s": None,
        "in_flight_bytes": None,
        "deliveries": 2,
    }
    with served.connect() as client:
        client.put("greta-bucket", "key", b"x" * 1024)
    assert "1.0 KiB of 1.0 MiB" in served.printed("usage", "--user", "greta")
    (user,) = served.document("usage", "--user", "greta")["users"]
    assert (user["bucket_count"], user["stored_bytes"]) == (1, 1024)


# --- the server -----------------------------------------------------------------------------------


def test_an_idle_server_has_nothing_at_the_top(served: AdminServed) -> None:
    assert "0 deliveries, 0 waiting" in served.printed("top", "--once")
    document = served.document("top", "--once")
    assert (document["now"]["deliveries"], document["achieved_bytes_per_s"]) == ([], {})


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_top_into_a_pipe_prints_whole_lines_at_once_until_nobody_reads(
    served: AdminServed, flags: tuple[str, ...]
) -> None:
    where = ("--endpoint", f"unix://{served.socket_path}", "--interval", "0.2", *flags)
    command = [sys.executable, "-m", "objectcache_operations", "admin", "top", *where]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as following:
        assert following.stdout is not None
        assert following.stderr is not None
        lines = [following.stdout.readline() for _ in range(3)]
        following.stdout.close()
        assert following.wait(BOUND_S) == 0
        assert following.stderr.read() == ""
    if flags:
        assert all("deliveries" in json.loads(line)["now"] for line in lines)
    else:
        head = r"[0-9]{2}:[0-9]{2}:[0-9]{2} 0 deliveries, 0 waiting, .* over the last second\n"
        assert all(re.fullmatch(head, line) for line in lines)


def test_health_is_shown_and_a_drained_server_exits_with_2(served: AdminServed) -> None:
    assert "status        ok" in served.printed("health")
    try:
        assert "status        draining" in served.printed("drain")
        assert served.admin("health").exit_code == 2
    finally:
        assert "status        ok" in served.printed("undrain")


def put_large(client: StorageClient, count: int) -> None:
    for number in range(count):
        client.put("bucket", f"key-{number}", bytes(32 * MIB))


def test_health_says_that_the_store_is_full_where_it_refuses_puts(tmp_path: Path) -> None:
    with AdminServed(tmp_path / "data", "storage.when_full=refuse") as full:
        assert "status        ok" in full.printed("health")
        with full.connect() as client:
            client.create_bucket("bucket")
            with pytest.raises(StorageFull):
                put_large(client, 5)
        shown = full.admin("health")
        assert shown.exit_code == 2
        assert "status        degraded" in shown.output
        said = "1 requests refused because the store or its device is full (StorageFull)"
        assert f"storage       degraded: lately: {said}" in shown.output


def test_what_is_logged_is_told_to_each_process(served: AdminServed) -> None:
    assert served.printed("log-level", "info", "--process", "storage") == "storage       ok\n"
    told = served.admin("log-level", "info")
    assert told.exit_code == 2  # no gateway runs here
    assert "gateway-0     gateway-0 does not answer" in told.stdout


def test_a_backup_is_a_private_file_that_is_restored(served: AdminServed, tmp_path: Path) -> None:
    served.printed("user", "add", "kept", "--access-key", "AKKEPT", "--secret-key", SECRET)
    file = tmp_path / "backup.json"
    passphrase = tmp_path / "passphrase"
    passphrase.write_text(PASSPHRASE + "\n")
    flags = ("--passphrase-file", str(passphrase))
    served.printed("backup", str(file), *flags)
    assert file.stat().st_mode & 0o777 == 0o600
    assert SECRET not in file.read_text()
    with AdminServed(tmp_path / "other") as other:
        assert "was changed" in refused(
            other.admin("restore", str(file), "--passphrase-file", "-", text="not the one\n")
        )
        assert "restored" in other.printed("restore", str(file), *flags)
        assert other.document("user", "show", "kept")["keys"][0]["access_key"] == "AKKEPT"
        assert "replace" in refused(other.admin("restore", str(file), *flags))
        other.printed("restore", str(file), *flags, "--replace")
    short = served.admin("backup", str(file), "--passphrase-file", "-", text="short\n")
    absent = refused(served.admin("backup", str(file), "--passphrase-file", "nope"))
    assert absent.endswith("--passphrase-file nope cannot be read: No such file or directory\n")
    assert "8 characters" in refused(short)
    assert "no passphrase" in refused(served.admin("backup", str(file)))
    file.write_text("{}")
    assert "is no backup" in refused(served.admin("restore", str(file), *flags))


# --- finding the server, and who asks -------------------------------------------------------------


def test_a_token_works_over_tcp_from_the_flag_and_from_the_environment(
    served: AdminServed, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--scope", "users:read", "--expires", "none")
    token = served.printed("token", "create", "reader", *flags).strip()
    assert token.startswith("oct_")
    where = ("--endpoint", served.url)
    assert admin("user", "list", *where, "--token", token).exit_code == 0
    denied = refused(admin("key", "list", *where, "--token", token))
    assert "keys:read" in denied
    assert "token is not known" in refused(admin("user", "list", *where, "--token", "oct_no"))
    monkeypatch.setenv("OBJECTCACHE_ADMIN_ENDPOINT", served.url)
    monkeypatch.setenv("OBJECTCACHE_ADMIN_TOKEN", token)
    assert admin("user", "list").exit_code == 0
    (listed,) = [
        one for one in served.document("token", "list")["tokens"] if one["name"] == "reader"
    ]
    assert listed["expires_s"] is None
    served.printed("token", "remove", listed["token_id"])
    assert admin("user", "list").exit_code == 2


def test_the_root_key_works_over_tcp(served: AdminServed) -> None:
    credentials = str(served.data_dir / "root-credentials")
    where = ("--endpoint", served.url, "--credentials", credentials)
    assert admin("user", "add", "remote", *where).exit_code == 0
    assert admin("key", "list", "--user", "remote", *where).exit_code == 0
    without = refused(admin("user", "list", "--endpoint", served.url))
    assert "--token" in without
    assert "--credentials" in without


def test_without_any_server_named_the_flags_are(served: AdminServed) -> None:
    line = refused(admin("user", "list"))
    assert "--data-dir DIR" in line
    assert "--endpoint URL" in line


def test_at_the_s3_port_it_says_where_the_admin_api_is() -> None:
    class S3(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b"<Error><Code>AccessDenied</Code></Error>"
            self.send_response(403)
            self.send_header("Content-Type", "application/xml")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), S3) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        line = refused(admin("user", "list", "--endpoint", url, "--token", "oct_x"))
        thread.join(20)
    assert "is the S3 port, not the admin API" in line
    assert "one port above the S3 port" in line


def test_where_nobody_listens_it_says_so(served: AdminServed) -> None:
    line = refused(admin("user", "list", "--endpoint", "http://127.0.0.1:1", "--token", "oct_x"))
    assert "http://127.0.0.1:1 cannot be reached" in line
    assert "endpoint 'ftp://x' must be" in refused(
        admin("user", "list", "--endpoint", "ftp://x", "--token", "oct_x")
    )


def test_names_are_completed_from_the_server(
    served: AdminServed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(name_arguments, "COMPLETION_TIMEOUT_S", BOUND_S)
    served.printed("user", "add", "complete-me", "--no-key")
    where = f"--endpoint unix://{served.socket_path}"
    environment = {
        "_OBJECTCACHE_COMPLETE": "complete_bash",
        "COMP_WORDS": f"objectcache admin user show {where} complete-",
        "COMP_CWORD": "6",
    }
    result = CliRunner().invoke(app, [], env=environment, prog_name="objectcache")
    assert result.stdout.split() == ["complete-me"]


def test_over_https_the_certificate_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)
    authority = Authority(tmp_path / "ca")
    pair = authority.pair("admin")
    settings = (f"admin.tls_certificate={pair.certificate}", f"admin.tls_key={pair.key}")
    with AdminServed(tmp_path / "data", *settings) as secure:
        assert secure.url.startswith("https://127.0.0.1:")
        credentials = str(secure.data_dir / "root-credentials")
        where = ("--endpoint", secure.url, "--credentials", credentials)
        added = admin("user", "add", "tls", *where, "--ca-file", str(authority.file))
        assert added.exit_code == 0, added.output
        untrusted = refused(admin("user", "list", *where))
        assert "not trusted" in untrusted
        assert "--ca-file" in untrusted
        plain = secure.url.replace("https://", "http://")
        assert admin("user", "list", "--endpoint", plain, "--token", "oct_x").exit_code == 2
        assert secure.printed("user", "list").startswith("user")  # the socket needs neither
