"""The accounts in force, changed one at a time, kept as a document."""

from __future__ import annotations

import configparser
import logging
import os
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from objectcache_runtime.root_key import (
    ROOT_ACCESS_KEY_VARIABLE,
    ROOT_CREDENTIALS_BYTES_MAX,
    ROOT_CREDENTIALS_FILE,
)
from objectcache_runtime.settings import Settings
from objectcache_schemas.accounts import ROOT_USER, AccountChange, User
from objectcache_schemas.errors import AccessDenied, Conflict, InvalidRequest, ObjectCacheError
from objectcache_schemas.messages.frames import MESSAGE_BYTES_MAX
from objectcache_schemas.operators.account_changes import Directory
from objectcache_storage_server.accounts.account_file import (
    SealedAccounts,
    by_name,
    read_accounts,
)
from objectcache_storage_server.accounts.account_rules import (
    Accounts,
    Surroundings,
    changed,
    checked,
    purged,
)
from objectcache_storage_server.accounts.bucket_grants import CreatedSOf
from objectcache_storage_server.accounts.master_key import load_or_create_master_key
from objectcache_storage_server.accounts.sealing import (
    KEY_BYTES,
    SecretSeal,
    open_with_passphrase,
    seal_with_passphrase,
)
from objectcache_storage_server.documents.documents import (
    ACCOUNTS,
    DocumentChanged,
    Documents,
    KeptDocument,
    MemoryDocuments,
)

DIRECTORY_BYTES_MAX = MESSAGE_BYTES_MAX // 2  # it travels as one message
PURGE_INTERVAL_S = 3600.0

logger = logging.getLogger("objectcache.storage_server.accounts")


class _InForce(NamedTuple):
    """Accounts and their version, replaced together."""

    version: int
    accounts: Accounts


class AccountBook:
    """The accounts in force. Methods block; from any thread.

    `version` is another number after every change, also over restarts.
    """

    def __init__(
        self,
        documents: Documents | None = None,
        seal: SecretSeal | None = None,
        root_access_key: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Read the document, which is made where there is none; without `documents` the accounts
        end with the process.

        Raises what `read_accounts` and `Documents.get` do. `root_access_key` is asked at every
        change.
        """
        self._documents = documents or MemoryDocuments()
        self._sealed = SealedAccounts(seal or SecretSeal(os.urandom(KEY_BYTES)))
        self._root_access_key = root_access_key
        self._publishing = threading.Lock()  # never held while the store is asked
        self._owners = threading.Lock()  # from the look at who owns what to the change; taken first
        self._listeners: list[Callable[[], None]] = []
        self._purged_s = 0.0
        self._in_force = _InForce(0, Accounts())
        # First, so that no change between the look and this is missed.
        self._documents.on_change(ACCOUNTS, self._changed_elsewhere)
        self._publish(self._first())

    @classmethod
    def open(
        cls, settings: Settings, documents: Documents, environment: Mapping[str, str]
    ) -> AccountBook:
        """The book of a server, sealed with its master key; one in memory where there is no data
        directory.

        From the first time on there is a document, so that one that is lost is missed.
        """
        if not settings.server.data_dir:
            return cls()
        data_dir = settings.data_dir
        is_first = documents.get(ACCOUNTS) is None
        key = load_or_create_master_key(data_dir, environment, may_create=is_first)
        return cls(documents, SecretSeal(key), lambda: root_access_key(data_dir, environment))

    def _first(self) -> _InForce:
        """What is kept, after making it where there is nothing."""
        while True:
            document = self._documents.get(ACCOUNTS)
            if document is not None:
                return _InForce(document.version, self._opened(document))
            with suppress(DocumentChanged):
                kept = self._documents.put(ACCOUNTS, self._sealed.encode(Accounts()), None)
                return _InForce(kept.version, Accounts())

    def _opened(self, document: KeptDocument) -> Accounts:
        return read_accounts(document, self._documents.place(ACCOUNTS), self._sealed)

    def _changed_elsewhere(self) -> None:
        """Another server has changed them."""
        self._read_again()
        self._tell()

    def _read_again(self) -> None:
        document = self._documents.get(ACCOUNTS)
        if document is not None and document.version != self.version:
            self._publish(_InForce(document.version, self._opened(document)))

    def _publish(self, accounts: _InForce) -> None:
        """Put accounts in force, unless newer ones are: versions grow."""
        with self._publishing:
            if accounts.version > self._in_force.version:
                self._in_force = accounts

    @property
    def accounts(self) -> Accounts:
        """What is in force."""
        return self._in_force.accounts

    @property
    def version(self) -> int:
        """Another number after every change."""
        return self._in_force.version

    def user(self, name: str) -> User | None:
        """A user by name."""
        return self.accounts.users.get(name)

    @contextmanager
    def keeping(self, owner: str) -> Generator[None, None, None]:
        """Nobody deletes this user within the block, which gives it a bucket.

        Raises `AccessDenied` where it has been deleted: whoever is called so next must inherit
        nothing.
        """
        with self._owners:
            if owner != ROOT_USER and owner not in self.accounts.users:
                raise AccessDenied(f"there is no user {owner} to own the bucket")
            yield

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` after every change, in the thread that made it."""
        self._listeners.append(listener)

    def directory(self) -> tuple[int, Accounts]:
        """The version, and the accounts that it is of; never blocks."""
        return self._in_force

    # --- changes ---

    def change(
        self,
        change: AccountChange,
        buckets_of: Callable[[str], list[str]],
        created_s_of: CreatedSOf = lambda _: None,
    ) -> int:
        """Make one change; returns the version from now on.

        Blocks until it outlives a crash. Raises what `changed` does, and `StorageFull` or
        `Unavailable` where it cannot be kept; then nothing has changed, or the message says that
        the change is in force and may be undone by a power loss.
        """
        around = Surroundings(self._root_access_key(), buckets_of, created_s_of)
        return self._replace(
            lambda accounts: changed(purged(accounts, time.time()), change, around)
        )

    def purge(self) -> None:
        """Forget what expired a while ago, if the last time is long ago enough. Where that cannot
        be kept it is for the next time: nothing that has expired is in force.
        """
        now_s = time.time()
        if now_s - self._purged_s < PURGE_INTERVAL_S:
            return
        self._purged_s = now_s
        if purged(self.accounts, now_s) is self.accounts:
            return  # without asking the store
        try:
            self._replace(lambda accounts: purged(accounts, now_s))
        except ObjectCacheError as error:
            logger.warning("expired keys and tokens are not forgotten yet: %s", error)

    def _replace(self, make: Callable[[Accounts], Accounts]) -> int:
        with self._owners:
            before = self.version
            fault = self._make(make)
            version = self.version
        if version != before:
            self._tell()
        if fault is not None:
            raise fault
        return version

    def _make(self, make: Callable[[Accounts], Accounts]) -> ObjectCacheError | None:
        """Keep what is made of the accounts; it is made again where another server was first."""
        if self._documents.follow():
            self._read_again()
        while True:
            before = self._in_force
            made = make(before.accounts)
            if made is before.accounts:
                return None
            _check_size(made)
            try:
                kept = self._documents.put(ACCOUNTS, self._sealed.encode(made), before.version)
            except DocumentChanged:
                self._read_again()
            else:
                self._publish(_InForce(kept.version, made))
                return kept.fault

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()

    # --- backup ---

    def export(self, passphrase: str) -> bytes:
        """All accounts, sealed with the passphrase. Raises `InvalidRequest`."""
        version, accounts = self.directory()
        plain = as_directory(version, accounts)
        return seal_with_passphrase(msgspec.msgpack.encode(plain), passphrase)

    def import_(self, data: bytes, passphrase: str, buckets_of: Callable[[str], list[str]]) -> int:
        """Replace all accounts by exported ones; returns the version from now on.

        Raises what `change` does, and `InvalidRequest` for another passphrase.
        """
        plain = open_with_passphrase(data, passphrase)
        around = Surroundings(self._root_access_key(), buckets_of)
        try:
            directory = msgspec.msgpack.decode(plain, type=Directory)
            made = Accounts(
                by_name(directory.users, lambda user: user.name),
                by_name(directory.keys, lambda key: key.access_key),
                by_name(directory.tokens, lambda token: token.token_id),
            )
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"the exported accounts cannot be read: {error}") from error
        return self._replace(lambda _: checked(made, around))

    def __repr__(self) -> str:
        held = self.accounts
        return f"<AccountBook {len(held.users)} users, {len(held.keys)} keys>"


def as_directory(version: int, accounts: Accounts, buckets_version: int = 0) -> Directory:
    """The accounts as gateways are told of them."""
    return Directory(
        version=version,
        buckets_version=buckets_version,
        users=tuple(accounts.users.values()),
        keys=tuple(accounts.keys.values()),
        tokens=tuple(accounts.tokens.values()),
    )


def _check_size(accounts: Accounts) -> None:
    size_bytes = len(msgspec.msgpack.encode(as_directory(0, accounts)))
    if size_bytes > DIRECTORY_BYTES_MAX:
        raise Conflict(
            f"the accounts would have {size_bytes} bytes, {DIRECTORY_BYTES_MAX} may be: remove "
            "users, keys or grants",
            code="LimitExceeded",
        )


def root_access_key(data_dir: Path, environment: Mapping[str, str]) -> str | None:
    """The root key's name as gateways read it, where this process can know it."""
    given = environment.get(ROOT_ACCESS_KEY_VARIABLE)
    if given:
        return given
    parser = configparser.ConfigParser(interpolation=None, default_section="")
    try:
        with (data_dir / ROOT_CREDENTIALS_FILE).open("rb") as stream:
            parser.read_string(stream.read(ROOT_CREDENTIALS_BYTES_MAX).decode())
        return parser["default"]["aws_access_key_id"]
    except (OSError, ValueError, KeyError, configparser.Error):
        return None  # the gateway says what is wrong with it
