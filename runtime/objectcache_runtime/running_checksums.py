"""The checksums that S3 clients ask for, over bytes that arrive in pieces.

All of them run in C that lets other threads run meanwhile (for pieces above a few KiB).
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from typing import Protocol, cast

Bytes = bytes | bytearray | memoryview


class RunningChecksum(Protocol):
    """A checksum over bytes that arrive in pieces."""

    def update(self, data: Bytes, /) -> None:
        """Take the next bytes."""
        ...

    def digest(self) -> bytes:
        """The value so far; CRCs in big-endian order."""
        ...


class _Crc:
    def __init__(self, function: object, width_bytes: int) -> None:
        # awscrt declares bytes and takes every buffer
        self._function = cast("Callable[[Bytes, int], int]", function)
        self._width_bytes = width_bytes
        self._value = 0

    def update(self, data: Bytes, /) -> None:
        self._value = self._function(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(self._width_bytes, "big")


def _crc32c() -> RunningChecksum:
    from awscrt import checksums as crt

    return _Crc(crt.crc32c, 4)


def _crc64nvme() -> RunningChecksum:
    from awscrt import checksums as crt

    return _Crc(crt.crc64nvme, 8)


# What begins each, by its name in lowercase as in x-amz-checksum-NAME.
CHECKSUMS: dict[str, Callable[[], RunningChecksum]] = {
    "crc32": lambda: _Crc(zlib.crc32, 4),
    "crc32c": _crc32c,
    "crc64nvme": _crc64nvme,
    "sha1": lambda: hashlib.sha1(usedforsecurity=False),
    "sha256": hashlib.sha256,
}
