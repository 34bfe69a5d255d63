"""The checksums of bytes that the storage server copies."""

from __future__ import annotations

import base64
import hashlib

from objectcache_runtime.running_checksums import CHECKSUMS, Bytes


class CopiedChecksums:
    """The MD5 of the bytes, and their checksum by one algorithm, or by none."""

    def __init__(self, algorithm: str | None) -> None:
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._named = {} if algorithm is None else {algorithm: CHECKSUMS[algorithm]()}

    def update(self, data: Bytes) -> None:
        """Take the next bytes."""
        self._md5.update(data)
        for running in self._named.values():
            running.update(data)

    @property
    def md5_hex(self) -> str:
        """The MD5 so far."""
        return self._md5.hexdigest()

    @property
    def checksums(self) -> dict[str, str]:
        """The value so far in base64, by its algorithm."""
        return {
            name: base64.b64encode(running.digest()).decode("ascii")
            for name, running in self._named.items()
        }
