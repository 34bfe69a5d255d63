"""The accounts on disk: durable, sealed, never silently empty."""

from __future__ import annotations

import base64
import errno
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from objectcache_runtime import private_files
from objectcache_runtime.settings import ServerSettings, Settings, StorageSettings
from objectcache_schemas.accounts import (
    Access,
    AccessKey,
    DeleteUser,
    Grant,
    PutKey,
    PutUser,
    User,
)
from objectcache_schemas.errors import (
    AccessDenied,
    Conflict,
    InvalidRequest,
    NotFound,
    ObjectCacheError,
    Unavailable,
)
from objectcache_storage_server.accounts import account_book, lost_accounts
from objectcache_storage_server.accounts.account_book import AccountBook
from objectcache_storage_server.accounts.master_key import (
    MASTER_KEY_VARIABLE,
    load_or_create_master_key,
)
from objectcache_storage_server.accounts.sealing import KEY_BYTES, CannotOpen, SecretSeal
from objectcache_storage_server.documents.documents import MemoryDocuments
from objectcache_storage_server.documents.open_documents import open_documents

SECRET = "correct-horse-battery"
PASSPHRASE = "stapled to the wall"


def opened(given: Settings, environment: Mapping[str, str]) -> AccountBook:
    return AccountBook.open(given, open_documents(given), environment)


def are_absent(given: Settings) -> bool:
    return lost_accounts.are_absent(given, open_documents(given))


def check_owners(given: Settings, owners: list[str]) -> None:
    lost_accounts.check_owners(given, open_documents(given), owners)


def settings(directory: Path, *, start_without_accounts: bool = False) -> Settings:
    return Settings(
        server=ServerSettings(data_dir=str(directory)),
        storage=StorageSettings(start_without_accounts=start_without_accounts),
    )


def nobodys(user: str) -> list[str]:
    return []


def filled(directory: Path, environment: dict[str, str] | None = None) -> AccountBook:
    book = opened(settings(directory), environment or {})
    book.change(PutUser(user=User(name="alice", created_s=1.0), create=True), nobodys)
    key = AccessKey(access_key="alice-1", secret_key=SECRET, user="alice", created_s=1.0)
    book.change(PutKey(key=key, create=True), nobodys)
    return book


def test_accounts_outlive_the_process_and_their_version_never_returns(tmp_path: Path) -> None:
    first = filled(tmp_path)
    second = opened(settings(tmp_path), {})
    assert second.accounts == first.accounts
    assert second.accounts.keys["alice-1"].secret_key == SECRET
    assert second.version > first.version > 0


def test_no_file_holds_a_secret_and_all_are_private(tmp_path: Path) -> None:
    filled(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"accounts.json", "master-key"}
    for file in tmp_path.iterdir():
        assert SECRET.encode() not in file.read_bytes()
        assert file.stat().st_mode & 0o777 == 0o600


def test_reprs_hold_no_secret(tmp_path: Path) -> None:
    book = filled(tmp_path)
    change = PutKey(key=book.accounts.keys["alice-1"], create=False)
    for shown in (book, book.accounts, change, account_book.as_directory(1, book.accounts)):
        assert SECRET not in repr(shown)


def test_another_master_key_is_an_error_that_names_the_remedy(tmp_path: Path) -> None:
    filled(tmp_path)
    other = base64.b64encode(os.urandom(32)).decode()
    with pytest.raises(InvalidRequest, match="another master key") as caught:
        opened(settings(tmp_path), {MASTER_KEY_VARIABLE: other})
    assert MASTER_KEY_VARIABLE in str(caught.value)
    assert other not in str(caught.value)


def test_a_missing_master_key_is_not_replaced_by_a_fresh_one(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / "master-key").unlink()
    with pytest.raises(InvalidRequest, match=r"master-key is missing.*of another one"):
        opened(settings(tmp_path), {})
    assert not (tmp_path / "master-key").exists()


def test_a_master_key_of_the_environment_leaves_none_on_disk(tmp_path: Path) -> None:
    given = {MASTER_KEY_VARIABLE: base64.b64encode(os.urandom(32)).decode()}
    filled(tmp_path, given)
    assert {file.name for file in tmp_path.iterdir()} == {"accounts.json"}
    assert "alice" in opened(settings(tmp_path), given).accounts.users


@pytest.mark.parametrize("text", ["short", "=" * 44, base64.b64encode(b"x" * 31).decode()])
def test_a_master_key_of_another_form_is_refused_unquoted(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidRequest, match="openssl rand") as caught:
        load_or_create_master_key(tmp_path, {MASTER_KEY_VARIABLE: text})
    assert text not in str(caught.value)


def test_a_master_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    load_or_create_master_key(tmp_path, {})
    (tmp_path / "master-key").chmod(0o640)
    with pytest.raises(InvalidRequest, match="chmod 600"):
        load_or_create_master_key(tmp_path, {})


@pytest.mark.parametrize("damage", [b"", b"{", b'{"v":1}', b"\xff\xfe", b"[" * 5000])
def test_a_damaged_file_is_an_error_and_never_empty(tmp_path: Path, damage: bytes) -> None:
    filled(tmp_path)
    (tmp_path / "accounts.json").write_bytes(damage)
    with pytest.raises(InvalidRequest, match="cannot be read as accounts"):
        opened(settings(tmp_path), {})
    assert (tmp_path / "accounts.json").read_bytes() == damage


def test_a_file_of_a_later_version_is_not_guessed_at(tmp_path: Path) -> None:
    filled(tmp_path)
    file = tmp_path / "accounts.json"
    file.write_bytes(file.read_bytes().replace(b'"v": 1', b'"v": 2'))
    with pytest.raises(InvalidRequest, match="its version is 2"):
        opened(settings(tmp_path), {})


def test_a_secret_moved_to_another_key_is_found_out(tmp_path: Path) -> None:
    filled(tmp_path)
    file = tmp_path / "accounts.json"
    file.write_bytes(file.read_bytes().replace(b'"alice-1"', b'"alice-2"'))
    with pytest.raises(InvalidRequest, match="alice-2 was changed"):
        opened(settings(tmp_path), {})


def test_a_change_that_cannot_be_kept_changes_nothing(tmp_path: Path) -> None:
    book = filled(tmp_path)
    version = book.version
    (tmp_path / "accounts.json.new").mkdir()  # in the way of the replacement
    with pytest.raises(ObjectCacheError, match="keeping the accounts") as caught:
        book.change(DeleteUser(name="alice"), nobodys)
    assert caught.value.code == "ServiceUnavailable"
    assert "alice" in book.accounts.users
    assert book.version == version


def test_a_change_whose_name_is_not_flushed_is_in_force_as_a_restart_would_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = filled(tmp_path)
    version, told = book.version, list[int]()
    book.on_change(lambda: told.append(book.version))

    def broken(directory: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(private_files, "flush_directory", broken)
    with pytest.raises(Unavailable, match="in force, but a power loss may undo it"):
        book.change(DeleteUser(name="alice"), nobodys)
    monkeypatch.undo()
    assert not book.accounts.users
    assert book.version > version
    assert told == [book.version]
    assert opened(settings(tmp_path), {}).accounts == book.accounts
    book.change(PutUser(user=User(name="bob", created_s=1.0), create=True), nobodys)
    assert set(opened(settings(tmp_path), {}).accounts.users) == {"bob"}


def test_nobody_who_was_deleted_is_given_a_bucket(tmp_path: Path) -> None:
    book = filled(tmp_path)
    owned: list[str] = []
    with ThreadPoolExecutor(1) as threads:
        with book.keeping("alice"):
            deleting = threads.submit(book.change, DeleteUser(name="alice"), lambda user: owned)
            owned.append("just-made")  # before whoever deletes may look
        with pytest.raises(Conflict, match="just-made"):
            deleting.result()
    owned.clear()
    book.change(DeleteUser(name="alice"), nobodys)
    with pytest.raises(AccessDenied, match="no user alice"), book.keeping("alice"):
        pass
    with book.keeping("root"):
        pass


def test_the_root_key_of_the_file_and_of_the_environment_cannot_be_taken(tmp_path: Path) -> None:
    book = filled(tmp_path)
    key = AccessKey(access_key="OCROOT", secret_key=SECRET, user="alice", created_s=1.0)
    (tmp_path / "root-credentials").write_text("[default]\naws_access_key_id = OCROOT\n")
    with pytest.raises(Conflict, match="root key"):
        book.change(PutKey(key=key, create=True), nobodys)
    by_environment = opened(settings(tmp_path), {"OBJECTCACHE_ROOT_ACCESS_KEY": "elsewhere"})
    by_environment.change(PutKey(key=key, create=True), nobodys)  # the file's is not in force


def test_an_export_opens_with_its_passphrase_alone(tmp_path: Path) -> None:
    book = filled(tmp_path / "first")
    data = book.export(PASSPHRASE)
    assert SECRET.encode() not in data
    other = opened(settings(tmp_path / "second"), {})
    with pytest.raises(InvalidRequest, match="passphrase is another"):
        other.import_(data, PASSPHRASE + "!", nobodys)
    with pytest.raises(InvalidRequest, match="damaged"):
        other.import_(data[:-1] + bytes([data[-1] ^ 1]), PASSPHRASE, nobodys)
    with pytest.raises(InvalidRequest, match="no exported accounts"):
        other.import_(b"tar", PASSPHRASE, nobodys)
    assert other.import_(data, PASSPHRASE, nobodys) == other.version
    assert other.accounts == book.accounts
    assert opened(settings(tmp_path / "second"), {}).accounts == book.accounts


def test_a_short_passphrase_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="8 to 1024"):
        filled(tmp_path).export("short")


def test_a_data_directory_has_a_file_before_it_has_a_user(tmp_path: Path) -> None:
    assert are_absent(settings(tmp_path))
    opened(settings(tmp_path), {})
    assert not are_absent(settings(tmp_path))
    assert not opened(settings(tmp_path), {}).accounts.users
    assert not are_absent(Settings())  # nothing is kept, so nothing is lost


def test_a_lost_file_is_missed_where_a_master_key_is_left(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / "accounts.json").unlink()
    with pytest.raises(
        InvalidRequest, match=r"accounts\.json is missing.*/master-key says"
    ) as caught:
        are_absent(settings(tmp_path))
    assert "storage.start_without_accounts=true" in str(caught.value)
    assert are_absent(settings(tmp_path, start_without_accounts=True))


def test_a_lost_file_is_missed_where_buckets_belong_to_users(tmp_path: Path) -> None:
    check_owners(settings(tmp_path), ["", "root"])
    with pytest.raises(InvalidRequest, match="there are buckets of a user alice"):
        check_owners(settings(tmp_path), ["root", "alice"])
    asked = settings(tmp_path, start_without_accounts=True)
    check_owners(asked, ["root", "alice"])


def test_without_a_data_directory_the_accounts_end_with_the_process() -> None:
    book = opened(Settings(), {})
    book.change(PutUser(user=User(name="alice", created_s=1.0), create=True), nobodys)
    assert "alice" in book.accounts.users
    with pytest.raises(NotFound, match="no user bob"):
        book.change(DeleteUser(name="bob"), nobodys)


def test_accounts_that_no_message_could_carry_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(account_book, "DIRECTORY_BYTES_MAX", 300)
    book = AccountBook()
    book.change(PutUser(user=User(name="alice", created_s=1.0), create=True), nobodys)
    grants = (Grant(bucket="logs", access=(Access.READ,), prefix="p" * 300),)
    large = PutUser(user=User(name="bob", created_s=1.0, grants=grants), create=True)
    with pytest.raises(Conflict, match="the accounts would have") as caught:
        book.change(large, nobodys, lambda bucket: 1.0)
    assert caught.value.code == "LimitExceeded"


def test_what_was_sealed_opens_under_its_own_name_alone() -> None:
    seal = SecretSeal(b"k" * 32)
    sealed = seal.seal(SECRET, "alice-1")
    assert seal.open(sealed, "alice-1") == SECRET
    assert seal.seal(SECRET, "alice-1") != sealed
    for opener, name in ((seal, "alice-2"), (SecretSeal(b"j" * 32), "alice-1")):
        with pytest.raises(CannotOpen):
            opener.open(sealed, name)
    with pytest.raises(CannotOpen):
        seal.open("no base64!", "alice-1")


def test_books_of_two_servers_make_no_change_of_the_other_undone() -> None:
    documents, seal = MemoryDocuments(), SecretSeal(os.urandom(KEY_BYTES))
    books = [AccountBook(documents, seal) for _ in range(2)]
    for number, book in enumerate((*books, *books)):
        user = User(name=f"user-{number}", created_s=1.0)
        book.change(PutUser(user=user, create=True), nobodys)
    assert set(books[1].accounts.users) == {f"user-{number}" for number in range(4)}
    with pytest.raises(Conflict, match="user-3"):  # which the first has not heard of
        books[0].change(PutUser(user=User(name="user-3", created_s=2.0), create=True), nobodys)
    assert books[0].accounts == books[1].accounts
    assert books[0].version == books[1].version


def test_servers_with_several_master_keys_do_not_share_accounts() -> None:
    documents = MemoryDocuments()
    AccountBook(documents, SecretSeal(b"a" * KEY_BYTES))
    with pytest.raises(InvalidRequest, match="all servers of a store have the same"):
        AccountBook(documents, SecretSeal(b"b" * KEY_BYTES))
