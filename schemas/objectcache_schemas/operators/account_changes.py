"""Accounts: followed, changed, exported and imported."""

from __future__ import annotations

from typing import Annotated

import msgspec

from objectcache_schemas.accounts import AccessKey, AccountChange, AdminToken, User
from objectcache_schemas.messages.message import Changes, Message, request


class Directory(Message, frozen=True):
    """Reply to `WatchDirectory`. Without a change of the accounts, the three lists are empty."""

    version: int
    buckets_version: int  # changes when a bucket goes or is configured
    users: tuple[User, ...] = ()
    keys: tuple[AccessKey, ...] = ()
    tokens: tuple[AdminToken, ...] = ()


@request(Directory, repeatable=False, changes=Changes.NOTHING)
class WatchDirectory(Message, frozen=True):
    """Ask for the accounts once they are others than the version known.

    Answered after `timeout_s` at the latest, then with what is known already. Version 0 is never
    one that is known.
    """

    known_version: int
    known_buckets_version: int
    timeout_s: Annotated[float, msgspec.Meta(ge=0, le=60)]


class AccountsChanged(Message, frozen=True):
    """Reply to `ChangeAccounts` and `ImportAccounts`."""

    version: int


@request(AccountsChanged, repeatable=False, changes=Changes.ACCOUNTS)
class ChangeAccounts(Message, frozen=True):
    """Make one change, durably. Reply: `AccountsChanged`, when every gateway that follows the
    accounts has it in force, or a second later.
    """

    change: AccountChange


class AccountsExported(Message, frozen=True):
    """Reply to `ExportAccounts`."""

    data: bytes


@request(AccountsExported, repeatable=False, changes=Changes.NOTHING)
class ExportAccounts(Message, frozen=True):
    """Ask for all accounts, secrets sealed with the passphrase."""

    passphrase: str

    def __repr__(self) -> str:
        return "<ExportAccounts>"


@request(AccountsChanged, repeatable=False, changes=Changes.ACCOUNTS)
class ImportAccounts(Message, frozen=True):
    """Replace all accounts by exported ones."""

    passphrase: str
    data: bytes

    def __repr__(self) -> str:
        return f"<ImportAccounts {len(self.data)} bytes>"
