from __future__ import annotations

import configparser
import os
import threading
from pathlib import Path

import pytest
from botocore.credentials import SharedCredentialProvider

from objectcache_gateway.signing.credentials import (
    CredentialStore,
    RootCredentials,
    load_or_create_root,
)
from objectcache_runtime.root_key import (
    ROOT_ACCESS_KEY_VARIABLE,
    ROOT_CREDENTIALS_FILE,
    ROOT_SECRET_KEY_VARIABLE,
)
from objectcache_schemas.errors import AccessDenied, InvalidRequest

GIVEN = {ROOT_ACCESS_KEY_VARIABLE: "admin", ROOT_SECRET_KEY_VARIABLE: "correct-horse"}


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    load_or_create_root(tmp_path, {})
    assert load_or_create_root(tmp_path, GIVEN) == RootCredentials(
        "admin", "correct-horse", "environment"
    )
    assert load_or_create_root(None, GIVEN).access_key == "admin"


@pytest.mark.parametrize("missing", [ROOT_ACCESS_KEY_VARIABLE, ROOT_SECRET_KEY_VARIABLE])
def test_half_a_pair_in_the_environment_names_the_other_half(missing: str) -> None:
    half = {name: value for name, value in GIVEN.items() if name != missing}
    with pytest.raises(InvalidRequest, match=missing):
        load_or_create_root(None, half)


def test_without_credentials_or_a_directory_the_remedy_is_named() -> None:
    with pytest.raises(InvalidRequest, match="--data-dir"):
        load_or_create_root(None, {})


def test_credentials_are_made_once_and_private(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    made = load_or_create_root(directory, {})
    file = directory / ROOT_CREDENTIALS_FILE
    assert made.source == str(file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert load_or_create_root(directory, {}) == made
    assert [entry.name for entry in directory.iterdir()] == [ROOT_CREDENTIALS_FILE]
    assert load_or_create_root(tmp_path / "other", {}).secret_key != made.secret_key


def test_aws_clients_read_the_file(tmp_path: Path) -> None:
    made = load_or_create_root(tmp_path, {})
    read = SharedCredentialProvider(str(tmp_path / ROOT_CREDENTIALS_FILE), "default").load()
    assert read is not None
    assert (read.access_key, read.secret_key) == (made.access_key, made.secret_key)


def test_processes_that_start_at_once_agree(tmp_path: Path) -> None:
    barrier = threading.Barrier(8)
    found: list[RootCredentials] = []

    def start() -> None:
        barrier.wait()
        found.append(load_or_create_root(tmp_path, {}))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == [ROOT_CREDENTIALS_FILE]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_file_that_others_may_read_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    load_or_create_root(tmp_path, {})
    (tmp_path / ROOT_CREDENTIALS_FILE).chmod(mode)
    with pytest.raises(InvalidRequest, match="chmod 600"):
        load_or_create_root(tmp_path, {})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[other]\naws_access_key_id=admin\n",
        "[default]\naws_access_key_id=admin\n",
        "aws_secret_access_key=very-secret\n",
        "[default]\nvery-secret\n",
        "[default]\na=" + "x" * 5000,
        "[default]\naws_access_key_id=admin\naws_secret_access_key=short\n",
        "[default]\naws_access_key_id=a b\naws_secret_access_key=very-secret\n",
    ],
)
def test_a_broken_file_is_named_and_its_secret_is_not_shown(tmp_path: Path, text: str) -> None:
    file = tmp_path / ROOT_CREDENTIALS_FILE
    file.touch(0o600)
    file.write_text(text)
    with pytest.raises(InvalidRequest, match=ROOT_CREDENTIALS_FILE) as refused:
        load_or_create_root(tmp_path, {})
    assert "very-secret" not in str(refused.value)
    assert "short" not in str(refused.value)
    assert refused.value.__cause__ is None
    assert file.read_text() == text


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / ROOT_CREDENTIALS_FILE
    file.touch(0o600)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidRequest, match="correct it, or delete it"):
        load_or_create_root(tmp_path, {})


def test_a_secret_with_a_percent_sign_or_a_hash_is_read_as_it_stands(tmp_path: Path) -> None:
    file = tmp_path / ROOT_CREDENTIALS_FILE
    file.touch(0o600)
    file.write_text("[default]\naws_access_key_id = admin\naws_secret_access_key = a%b#c;d=e\n")
    assert load_or_create_root(tmp_path, {}).secret_key == "a%b#c;d=e"


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequest, match="root-credentials"):
        load_or_create_root(tmp_path / "file", {})


@pytest.mark.parametrize(
    ("access_key", "secret_key"),
    [
        ("ab", "long-enough"),
        ("a" * 129, "long-enough"),
        ("with/slash", "long-enough"),
        ("with space", "long-enough"),
        ("admin\n", "long-enough"),
        ("admin", "7 chars"),
        ("admin", "1234567"),
        ("admin", "with a space"),
    ],
)
def test_impossible_key_pairs_are_refused_without_showing_the_secret(
    access_key: str, secret_key: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        RootCredentials(access_key, secret_key, "environment")
    assert secret_key not in str(refused.value)


def test_the_secret_never_shows_in_a_repr() -> None:
    root = RootCredentials("admin", "correct-horse", "environment")
    assert "correct-horse" not in repr(root) + repr(CredentialStore(root))
    assert "admin" in repr(CredentialStore(root))


def test_the_store_knows_the_root_key_and_no_other() -> None:
    store = CredentialStore(RootCredentials("admin", "correct-horse", "environment"))
    assert store.secret_for("admin") == "correct-horse"
    assert store.identity_for("admin") == "root"
    for unknown in ("", "Admin", "root"):
        assert store.secret_for(unknown) is None
        with pytest.raises(AccessDenied):
            store.identity_for(unknown)


def test_the_file_is_an_ini_file_with_a_default_section(tmp_path: Path) -> None:
    load_or_create_root(tmp_path, {})
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(os.fspath(tmp_path / ROOT_CREDENTIALS_FILE))
    assert set(parser["default"]) == {"aws_access_key_id", "aws_secret_access_key"}
