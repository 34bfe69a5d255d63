"""Keys made of passphrases, the same way wherever one seals or proves something."""

from __future__ import annotations

import hashlib

# About 32 MiB and a tenth of a second for each guess.
_SCRYPT_N, _SCRYPT_R, _SCRYPT_P = 1 << 15, 8, 1
_SCRYPT_MEMORY_BYTES_MAX = 64 << 20


def passphrase_key(passphrase: bytes, salt: bytes, length_bytes: int) -> bytes:
    """A key of so many bytes; other salts give other keys."""
    return hashlib.scrypt(
        passphrase,
        salt=salt,
        n=_SCRYPT_N,
        r=_SCRYPT_R,
        p=_SCRYPT_P,
        maxmem=_SCRYPT_MEMORY_BYTES_MAX,
        dklen=length_bytes,
    )
