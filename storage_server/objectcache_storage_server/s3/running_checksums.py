"""The checksums that S3 clients ask for, over bytes that the storage server copies."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Callable
from typing import Protocol, cast

Bytes = bytes | bytearray | memoryview


class Running(Protocol):
    """A checksum over bytes that arrive in pieces."""

    def update(self, data: Bytes, /) -> None:
        """Take the next bytes."""
        ...

    def digest(self) -> bytes:
        """The value so far."""
        ...


_CrcFunction = Callable[[Bytes, int], int]  # awscrt declares bytes and takes every buffer


class _Crc:
    def __init__(self, function: _CrcFunction, width_bytes: int) -> None:
        self._function = function
        self._width_bytes = width_bytes
        self._value = 0

    def update(self, data: Bytes, /) -> None:
        self._value = self._function(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(self._width_bytes, "big")


def _crc32c() -> Running:
    from awscrt import checksums as crt

    return _Crc(cast(_CrcFunction, crt.crc32c), 4)


def _crc64nvme() -> Running:
    from awscrt import checksums as crt

    return _Crc(cast(_CrcFunction, crt.crc64nvme), 8)


_START: dict[str, Callable[[], Running]] = {
    "crc32": lambda: _Crc(zlib.crc32, 4),
    "crc32c": _crc32c,
    "crc64nvme": _crc64nvme,
    "sha1": lambda: hashlib.sha1(usedforsecurity=False),
    "sha256": hashlib.sha256,
}


class RunningChecksums:
    """The MD5 of the bytes, and their checksum by one algorithm, or by none."""

    def __init__(self, algorithm: str | None) -> None:
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._named = {} if algorithm is None else {algorithm: _START[algorithm]()}

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
