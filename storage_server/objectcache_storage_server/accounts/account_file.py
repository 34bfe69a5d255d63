"""The accounts as they are kept, in DATA_DIR/accounts.json say: JSON, every secret sealed.

`check` is a text sealed with the same key, so that another master key is found out before a secret
is used, also where there is none yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from objectcache_schemas.accounts import AccessKey, AdminToken, User
from objectcache_schemas.errors import InvalidRequest
from objectcache_storage_server.accounts.account_rules import Accounts
from objectcache_storage_server.accounts.master_key import MASTER_KEY_VARIABLE
from objectcache_storage_server.accounts.sealing import CannotOpen, SecretSeal
from objectcache_storage_server.documents.documents import KeptDocument

R = TypeVar("R", User, AccessKey, AdminToken)

VERSION = 1
CHECK_NAME = "objectcache master key check"
_PLACEHOLDER = "sealed.."  # stands where the secret was; its form is that of a secret


class SealedKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An access key, its secret apart."""

    key: AccessKey  # with a placeholder for its secret
    sealed_secret: str


class AccountFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The whole file."""

    v: int
    check: str
    users: tuple[User, ...] = ()
    keys: tuple[SealedKey, ...] = ()
    tokens: tuple[AdminToken, ...] = ()


_DECODER = msgspec.json.Decoder(AccountFile)


class SealedAccounts:
    """Turns accounts into the file's bytes and back. Remembers what it has sealed."""

    def __init__(self, seal: SecretSeal) -> None:
        self._seal = seal
        self._sealed: dict[str, tuple[str, str]] = {}  # access key: secret, the same sealed

    def encode(self, accounts: Accounts) -> bytes:
        """The file that holds these accounts."""
        sealed = {name: self._sealed_secret(key) for name, key in accounts.keys.items()}
        self._sealed = {
            name: (accounts.keys[name].secret_key, text) for name, text in sealed.items()
        }
        content = AccountFile(
            v=VERSION,
            check=self._seal.seal(CHECK_NAME, CHECK_NAME),
            users=tuple(accounts.users.values()),
            keys=tuple(
                SealedKey(msgspec.structs.replace(key, secret_key=_PLACEHOLDER), sealed[name])
                for name, key in accounts.keys.items()
            ),
            tokens=tuple(accounts.tokens.values()),
        )
        return msgspec.json.format(msgspec.json.encode(content), indent=1)

    def _sealed_secret(self, key: AccessKey) -> str:
        secret, sealed = self._sealed.get(key.access_key, ("", ""))
        return sealed if secret == key.secret_key else self._seal.seal(*_secret_and_name(key))

    def decode(self, data: bytes) -> Accounts:
        """The accounts of a file.

        Raises `msgspec.MsgspecError` for what is no such file, `CannotOpen` where it was sealed
        with another key.
        """
        content = _DECODER.decode(data)
        if content.v != VERSION:
            raise msgspec.ValidationError(f"its version is {content.v}, not {VERSION}")
        self._seal.open(content.check, CHECK_NAME)
        keys: list[AccessKey] = []
        for sealed in content.keys:
            secret = self._opened(sealed)
            keys.append(msgspec.structs.replace(sealed.key, secret_key=secret))
            self._sealed[sealed.key.access_key] = secret, sealed.sealed_secret
        return Accounts(
            by_name(content.users, lambda user: user.name),
            by_name(tuple(keys), lambda key: key.access_key),
            by_name(content.tokens, lambda token: token.token_id),
        )

    def _opened(self, sealed: SealedKey) -> str:
        try:
            return self._seal.open(sealed.sealed_secret, sealed.key.access_key)
        except CannotOpen as error:
            raise msgspec.ValidationError(
                f"the secret of access key {sealed.key.access_key} was changed"
            ) from error


def by_name(records: tuple[R, ...], name_of: Callable[[R], str]) -> Mapping[str, R]:
    """Records by name. Raises `msgspec.ValidationError` where one is there twice."""
    found = {name_of(record): record for record in records}
    if len(found) != len(records):
        raise msgspec.ValidationError("a record is there twice")
    return found


def _secret_and_name(key: AccessKey) -> tuple[str, str]:
    return key.secret_key, key.access_key


def read_accounts(document: KeptDocument, place: str, sealed: SealedAccounts) -> Accounts:
    """The accounts of a document, which lies in `place`.

    Raises `InvalidRequest` that names the place and the remedy where it makes no sense or was
    sealed with another key.
    """
    try:
        return sealed.decode(document.data)
    except CannotOpen as error:
        raise InvalidRequest(
            f"{place} was sealed with another master key; put back DATA_DIR/master-key, or set "
            f"{MASTER_KEY_VARIABLE} to the key it was sealed with: all servers of a store have the "
            "same"
        ) from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(
            f"{place} cannot be read as accounts: {error}; put back a copy of it, or restore a "
            "backup into a server without it"
        ) from error
