"""An address opens its store, or says what is wrong with it."""

from __future__ import annotations

import stat
import sys
import time
from pathlib import Path

import pytest

from objectcache_schemas.errors import InvalidRequest, Unavailable
from objectcache_storage_server.engines.stores.folder.folder_store import FolderStore
from objectcache_storage_server.engines.stores.open_store import open_store
from objectcache_storage_server.engines.stores.s3 import s3_store
from objectcache_storage_server.engines.stores.s3.s3_settings import S3Settings, obstore_options
from objectcache_storage_server.engines.stores.shared_store import StoreTimeout
from tests.servers import free_port


def test_a_folder_is_opened_by_its_path(tmp_path: Path) -> None:
    root = tmp_path / "with space"
    address = f"file://{tmp_path}/with%20space"
    with pytest.raises(Unavailable):
        open_store(address)
    made = open_store(address, create=True)
    assert isinstance(made, FolderStore)
    made.close()
    open_store(address).close()
    assert (root / "store").exists()


def test_no_store_is_made_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(InvalidRequest, match="is no folder"):
        open_store(f"file://{tmp_path}/file", create=True)
    assert (tmp_path / "file").read_text() == "kept"


def test_one_folder_is_made_and_not_those_above_it(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=f"no folder {tmp_path}/not/mounted to make"):
        open_store(f"file://{tmp_path}/not/mounted/store", create=True)
    assert list(tmp_path.iterdir()) == []


def test_folders_that_a_store_makes_are_its_owners(tmp_path: Path) -> None:
    shared = tmp_path / "operators"
    shared.mkdir(mode=0o770)
    shared.chmod(0o770)
    store = open_store(f"file://{shared}", create=True)
    store.put("w/1", [memoryview(b"body")], time.monotonic() + 60)
    assert store.append(0, b"record", time.monotonic() + 60)
    store.close()
    assert stat.S_IMODE(shared.stat().st_mode) == 0o770
    for path in shared.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("/path", "file:///PATH"),
        ("ftp://host/path", "begins with 'ftp'"),
        ("file://host/path", "file:///PATH"),
        ("file:///path?create=1", "without options"),
        ("file:relative", "absolute"),
        ("file:/path", "file:///PATH"),
        ("file:///", "the root directory"),
        ("file:///tmp/..", "the root directory"),
        ("s3://", "no name of a bucket"),
        ("s3://Bucket/", "no name of a bucket"),
        ("s3://bucket/a//b", "prefix"),
        ("s3://bucket/../b", "prefix"),
        ("s3://bucket/a b", "prefix"),
        ("s3://bucket?endpoint=host:9000", "endpoint is"),
        ("s3://bucket?endpoint=http://host/path", "endpoint is"),
        ("s3://bucket?endpoint=http://key:secret@host", "endpoint is"),
        ("s3://bucket?region=a&region=b", "twice"),
        ("s3://bucket?style=other", "path or virtual"),
        ("s3://bucket?secret=x", "no option secret; there are endpoint"),
        ("s3://bucket#x", "s3://BUCKET"),
        ("s3://bucket?profile=no-such-profile-anywhere", "profile"),
        ("daos://pool", "daos://POOL/CONTAINER"),
        ("daos:///container", "daos://POOL/CONTAINER"),
        ("daos://pool/a/b", "daos://POOL/CONTAINER"),
        ("daos://pool/container?x=1", "without options"),
        ("rados://", "pool"),
        ("rados://pool?colour=red", "colour"),
    ],
)
def test_an_address_that_is_wrong_is_told_why(address: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        open_store(address)


def test_a_key_in_an_address_is_refused_and_not_repeated() -> None:
    with pytest.raises(InvalidRequest, match="not part of the store's address") as caught:
        open_store("s3://AKIA123:topsecret@bucket/prefix")
    assert "topsecret" not in str(caught.value)


def test_half_a_key_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="secret access key"):
        open_store("s3://bucket", access_key_id="key")


def test_options_of_an_address_are_those_of_the_store(tmp_path: Path) -> None:
    certificates = tmp_path / "ca.pem"
    certificates.write_bytes(b"pem")
    found = S3Settings.from_address(
        f"s3://bucket/a/b/?endpoint=https://host:9000/&region=eu&ca={certificates}&style=virtual",
        "key",
        "secret",
    )
    assert found.key("log/1") == "a/b/log/1"
    assert "secret" not in repr(found).replace("secret_access_key", "")
    options = obstore_options(found)
    assert options["config"]["endpoint"] == "https://host:9000"
    assert options["config"]["region"] == "eu"
    assert options["config"]["virtual_hosted_style_request"] is True
    assert options["client_options"] == {"allow_http": False, "root_certificate": b"pem"}


def test_certificates_that_are_not_there_are_told() -> None:
    with pytest.raises(InvalidRequest, match="ca: /no/such/file"):
        obstore_options(S3Settings.from_address("s3://bucket?ca=/no/such/file", "key", "secret"))


@pytest.mark.parametrize(
    ("host", "reason"),
    [("127.0.0.1", "Connection refused"), ("no-host.invalid", "the host's name is not known")],
)
def test_who_makes_a_store_is_told_why_its_endpoint_is_not_reached(host: str, reason: str) -> None:
    endpoint = f"http://{host}:{free_port()}"
    with pytest.raises(Unavailable) as caught:
        open_store(
            f"s3://bucket?endpoint={endpoint}",
            create=True,
            access_key_id="key",
            secret_access_key="secret",
        )
    assert str(caught.value).startswith(
        f"s3://bucket at {endpoint} cannot be reached (connection: {reason})"
    )


def test_without_a_key_it_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "from-environment")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "its-secret")
    options = obstore_options(S3Settings("bucket"))
    assert "access_key_id" not in options["config"]
    found = options["credential_provider"]()
    assert (found["access_key_id"], found["secret_access_key"]) == (
        "from-environment",
        "its-secret",
    )
    assert found["expires_at"] is not None


def test_a_profile_is_taken_from_the_shared_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "credentials"
    shared.write_text("[other]\naws_access_key_id = of-profile\naws_secret_access_key = s\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(shared))
    options = obstore_options(S3Settings("bucket", profile="other"))
    assert options["credential_provider"]()["access_key_id"] == "of-profile"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        name for name in sys.modules if name.startswith("obstore") or ".stores.s3.s3_" in name
    ]:
        if not name.endswith("s3_settings"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(InvalidRequest, match=r"objectcache\[s3\]"):
        open_store("s3://bucket", access_key_id="key", secret_access_key="secret")


def test_an_endpoint_that_nobody_listens_at_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_store, "OPEN_S", 0.3)
    endpoint = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(StoreTimeout, match=f"s3://bucket/prefix at {endpoint} does not answer"):
        open_store(
            f"s3://bucket/prefix?endpoint={endpoint}",
            access_key_id="key",
            secret_access_key="secret",
        )
