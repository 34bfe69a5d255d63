"""Whose requests the gateway believes: the root credentials and the store of access keys."""

from __future__ import annotations

import configparser
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from objectcache_gateway.access.directory import AccessDirectory
from objectcache_gateway.access.permissions import ROOT, Caller
from objectcache_gateway.signing.made_up_keys import made_up_access_key, made_up_secret_key
from objectcache_gateway.signing.sigv4 import NO_SUCH_KEY, FormerKey
from objectcache_runtime.private_files import create_once, read_private
from objectcache_runtime.root_key import (
    ROOT_ACCESS_KEY_VARIABLE,
    ROOT_CREDENTIALS_BYTES_MAX,
    ROOT_CREDENTIALS_FILE,
    ROOT_SECRET_KEY_VARIABLE,
)
from objectcache_schemas.accounts import AccessKey, User
from objectcache_schemas.errors import AccessDenied, InvalidRequest, Unavailable

SECRET_CHARS_MIN = 8
SECRET_CHARS_MAX = 1024
_ACCESS_KEY = re.compile(r"[A-Za-z0-9_+=,.@-]{3,128}")
_SECRET_KEY = re.compile(rf"[\x21-\x7e]{{{SECRET_CHARS_MIN},{SECRET_CHARS_MAX}}}")


@dataclass(frozen=True, slots=True)
class RootCredentials:
    """The key pair that may do everything. Raises `InvalidRequest` for an impossible one."""

    access_key: str
    secret_key: str = field(repr=False)
    source: str  # where it came from: "environment" or the file's path

    def __post_init__(self) -> None:
        if not _ACCESS_KEY.fullmatch(self.access_key):
            raise InvalidRequest(
                f"{self.source}: the root access key must be 3 to 128 of A-Z a-z 0-9 _+=,.@-"
            )
        if not _SECRET_KEY.fullmatch(self.secret_key):
            raise InvalidRequest(
                f"{self.source}: the root secret key must be {SECRET_CHARS_MIN} to "
                f"{SECRET_CHARS_MAX} printable ASCII characters without spaces"
            )


class CredentialStore:
    """Access keys and who they belong to: the root key, and those of a directory if there is one.

    A key that is disabled, has expired, or whose user is disabled, opens nothing; only who has its
    secret is told that it is there.
    """

    def __init__(
        self,
        root: RootCredentials,
        directory: AccessDirectory | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock` gives Unix time."""
        self._root = root
        self._directory = directory
        self._clock = clock

    def follow(self, directory: AccessDirectory) -> None:
        """Believe the keys of this directory from now on."""
        self._directory = directory

    def secret_for(self, access_key: str) -> str | None:
        """The secret of an access key, or None for one that is not in force.

        Raises `Unavailable` where the accounts are not known yet.
        """
        if access_key == self._root.access_key:
            return self._root.secret_key
        if self._directory is not None and not self._directory.is_loaded:
            raise Unavailable("the accounts are not known yet")
        found = self._found(access_key)
        return found[1].secret_key if found else None

    def caller_for(self, access_key: str) -> Caller:
        """Who the key belongs to, and what that one may do; raises `AccessDenied` for a key that
        is not in force, and says why: ask for whoever has shown its secret.
        """
        if access_key == self._root.access_key:
            return ROOT
        found = self._found(access_key)
        if found is None:
            former = self.former_key_for(access_key)
            why = former.why if former is not None else NO_SUCH_KEY
            raise AccessDenied(why, code="InvalidAccessKeyId")
        return Caller.of(*found)

    def identity_for(self, access_key: str) -> str:
        """Who the key belongs to; raises `AccessDenied` for one that does not exist."""
        return self.caller_for(access_key).identity

    def former_key_for(self, access_key: str) -> FormerKey | None:
        """A key that is there and not in force, and why; None for any other."""
        key = self._directory.key(access_key) if self._directory else None
        if self._directory is None or key is None:
            return None
        user = self._directory.user(key.user)
        if user is None:
            return None
        if not key.enabled:
            return FormerKey(key.secret_key, "the access key is disabled")
        if self._has_expired(key):
            return FormerKey(key.secret_key, "the access key has expired")
        if not user.enabled:
            return FormerKey(key.secret_key, "the access key's user is disabled")
        return None

    def _has_expired(self, key: AccessKey) -> bool:
        return key.expires_s is not None and key.expires_s <= self._clock()

    def _found(self, access_key: str) -> tuple[User, AccessKey] | None:
        """A key that is in force, and its user."""
        key = self._directory.key(access_key) if self._directory else None
        if self._directory is None or key is None:
            return None
        user = self._directory.user(key.user)
        if user is None or not user.enabled or not key.enabled or self._has_expired(key):
            return None
        return user, key

    def __repr__(self) -> str:
        return f"<CredentialStore root key {self._root.access_key}>"


def load_or_create_root(data_dir: Path | None, environment: Mapping[str, str]) -> RootCredentials:
    """Root credentials of the environment, else of DATA_DIR/root-credentials, which is made once.

    The file is an AWS shared credentials file, so AWS_SHARED_CREDENTIALS_FILE can name it. Of
    several processes that start at once, one makes it and all use it. Raises `InvalidRequest`
    naming the remedy.
    """
    given = _from_environment(environment)
    if given is not None:
        return given
    if data_dir is None:
        raise InvalidRequest(
            f"no root credentials: set {ROOT_ACCESS_KEY_VARIABLE} and {ROOT_SECRET_KEY_VARIABLE}, "
            "or give --data-dir DIR"
        )
    file = data_dir / ROOT_CREDENTIALS_FILE
    try:
        return _from_file(file) or _create(file)
    except OSError as error:
        raise InvalidRequest(f"root credentials file {file}: {error.strerror}") from error


def _from_environment(environment: Mapping[str, str]) -> RootCredentials | None:
    access_key = environment.get(ROOT_ACCESS_KEY_VARIABLE)
    secret_key = environment.get(ROOT_SECRET_KEY_VARIABLE)
    if not access_key and not secret_key:
        return None
    if not access_key or not secret_key:
        missing = ROOT_SECRET_KEY_VARIABLE if access_key else ROOT_ACCESS_KEY_VARIABLE
        raise InvalidRequest(f"{missing} is not set; the root access key needs both variables")
    return RootCredentials(access_key, secret_key, "environment")


def _from_file(file: Path) -> RootCredentials | None:
    data = read_private(file, ROOT_CREDENTIALS_BYTES_MAX)
    return None if data is None else _parsed(file, data)


def _parsed(file: Path, data: bytes) -> RootCredentials:
    parser = configparser.ConfigParser(interpolation=None, default_section="")
    try:
        if len(data) > ROOT_CREDENTIALS_BYTES_MAX:
            raise ValueError
        parser.read_string(data.decode("utf-8"))
        section = parser["default"]
        access_key, secret_key = section["aws_access_key_id"], section["aws_secret_access_key"]
    except (configparser.Error, ValueError, KeyError):
        # Without the cause: a parser's message quotes the lines, and so the secret.
        raise InvalidRequest(
            f"{file} needs a section [default] with aws_access_key_id and aws_secret_access_key; "
            "correct it, or delete it to have another pair made"
        ) from None
    return RootCredentials(access_key, secret_key, str(file))


def _create(file: Path) -> RootCredentials:
    made = RootCredentials(made_up_access_key(), made_up_secret_key(), str(file))
    text = (
        f"[default]\naws_access_key_id = {made.access_key}\n"
        f"aws_secret_access_key = {made.secret_key}\n"
    )
    create_once(file, text.encode("ascii"))
    winner = _from_file(file)
    if winner is None:
        raise InvalidRequest(f"{file} was removed while it was being made; start again")
    return winner
