"""The key that seals secrets at rest: of the environment, or of DATA_DIR/master-key, made once.

Beside the accounts the key guards against a copied accounts file alone. Whoever wants it to guard
against a copied disk gives it by OBJECTCACHE_MASTER_KEY, from a store of secrets.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping
from pathlib import Path

from objectcache_runtime.private_files import create_once, read_private
from objectcache_schemas.errors import InvalidRequest
from objectcache_storage_server.accounts.sealing import KEY_BYTES

MASTER_KEY_VARIABLE = "OBJECTCACHE_MASTER_KEY"
FILE_NAME = "master-key"
FILE_BYTES_MAX = 256  # one short line; more is another file


def load_or_create_master_key(
    data_dir: Path, environment: Mapping[str, str], *, may_create: bool = True
) -> bytes:
    """The key of the environment, else of DATA_DIR/master-key, which is made once.

    `may_create` false: there is something that was sealed with a key already, so a fresh one would
    not do. Raises `InvalidRequest` naming the remedy.
    """
    given = environment.get(MASTER_KEY_VARIABLE)
    if given:
        return _decoded(given, MASTER_KEY_VARIABLE)
    file = data_dir / FILE_NAME
    try:
        found = _from_file(file)
        if found is None and not may_create:
            raise InvalidRequest(
                f"{file} is missing, and there are accounts that are sealed with a master key: put "
                f"it back, or set {MASTER_KEY_VARIABLE}; where several servers share a store, copy "
                f"the file from the data directory of another one"
            )
        return found or _create(file)
    except OSError as error:
        raise InvalidRequest(f"master key file {file}: {error.strerror}") from error


def _decoded(text: str, source: str) -> bytes:
    try:
        key = base64.b64decode(text.strip(), validate=True)
    except (binascii.Error, ValueError):
        key = b""  # without the cause, which could quote the key
    if len(key) != KEY_BYTES:
        raise InvalidRequest(
            f"{source} must be {KEY_BYTES} bytes in base64; make one with: openssl rand -base64 32"
        )
    return key


def _from_file(file: Path) -> bytes | None:
    data = read_private(file, FILE_BYTES_MAX)
    if data is None:
        return None
    return _decoded(data[:FILE_BYTES_MAX].decode("ascii", "replace"), str(file))


def _create(file: Path) -> bytes:
    create_once(file, base64.b64encode(os.urandom(KEY_BYTES)) + b"\n")
    winner = _from_file(file)
    if winner is None:
        raise InvalidRequest(f"{file} was removed while it was being made; start again")
    return winner
