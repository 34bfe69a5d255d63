"""Secrets at rest: sealed with AES-256-GCM under the master key, or under a passphrase.

A sealed secret is bound to the name beside it, so one cannot be moved to another record. SigV4
needs the secret itself, so it cannot be kept as a hash.
"""

from __future__ import annotations

import base64
import binascii
import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from objectcache_runtime.passphrases import passphrase_key
from objectcache_schemas.errors import InvalidRequest

KEY_BYTES = 32
NONCE_BYTES = 12
SALT_BYTES = 16
PASSPHRASE_CHARS_MIN = 8
PASSPHRASE_CHARS_MAX = 1024
_EXPORT_MAGIC = b"objectcache-accounts-1\n"


class CannotOpen(Exception):
    """What was sealed was sealed with another key or under another name, or it was changed."""


class SecretSeal:
    """Seals and opens short texts under one key."""

    def __init__(self, key: bytes) -> None:
        assert len(key) == KEY_BYTES
        self._cipher = AESGCM(key)

    def seal(self, text: str, name: str) -> str:
        """The text sealed under `name`, in base64."""
        nonce = os.urandom(NONCE_BYTES)
        sealed = self._cipher.encrypt(nonce, text.encode(), name.encode())
        return base64.b64encode(nonce + sealed).decode()

    def open(self, sealed: str, name: str) -> str:
        """The text again. Raises `CannotOpen`."""
        try:
            data = base64.b64decode(sealed, validate=True)
            return self._cipher.decrypt(
                data[:NONCE_BYTES], data[NONCE_BYTES:], name.encode()
            ).decode()
        except (InvalidTag, binascii.Error, ValueError) as error:
            raise CannotOpen from error

    def __repr__(self) -> str:
        return "<SecretSeal>"


def seal_with_passphrase(data: bytes, passphrase: str) -> bytes:
    """The data sealed for a file. Raises `InvalidRequest` for a passphrase that is too short."""
    _check_passphrase(passphrase)
    salt, nonce = os.urandom(SALT_BYTES), os.urandom(NONCE_BYTES)
    sealed = AESGCM(passphrase_key(passphrase.encode(), salt, KEY_BYTES)).encrypt(
        nonce, data, _EXPORT_MAGIC
    )
    return _EXPORT_MAGIC + salt + nonce + sealed


def open_with_passphrase(sealed: bytes, passphrase: str) -> bytes:
    """The data again. Raises `InvalidRequest` where it is another file or another passphrase."""
    _check_passphrase(passphrase)
    if not sealed.startswith(_EXPORT_MAGIC):
        raise InvalidRequest("the data are no exported accounts of this version")
    rest = sealed[len(_EXPORT_MAGIC) :]
    salt, nonce = rest[:SALT_BYTES], rest[SALT_BYTES : SALT_BYTES + NONCE_BYTES]
    try:
        cipher = AESGCM(passphrase_key(passphrase.encode(), salt, KEY_BYTES))
        return cipher.decrypt(nonce, rest[SALT_BYTES + NONCE_BYTES :], _EXPORT_MAGIC)
    except (InvalidTag, ValueError) as error:
        raise InvalidRequest(
            "the exported accounts cannot be opened: the passphrase is another, or they are damaged"
        ) from error


def _check_passphrase(passphrase: str) -> None:
    if not PASSPHRASE_CHARS_MIN <= len(passphrase) <= PASSPHRASE_CHARS_MAX:
        raise InvalidRequest(
            f"a passphrase has {PASSPHRASE_CHARS_MIN} to {PASSPHRASE_CHARS_MAX} characters"
        )
