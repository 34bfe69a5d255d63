"""What an NVMe command ended with, as the `OSError` that it means. Pure.

The kernel reports a negative errno, or the controller's status field: status code in bits 0 to 7,
its type in bits 8 to 10, "do not retry" in bit 14.
"""

from __future__ import annotations

import errno
import os

_DO_NOT_RETRY = 1 << 14
_GENERIC, _COMMAND_SPECIFIC, _MEDIA, _PATH = range(4)

_WORDS: dict[tuple[int, int], str] = {
    (_GENERIC, 0x01): "invalid command opcode",
    (_GENERIC, 0x02): "invalid field in command",
    (_GENERIC, 0x04): "data transfer error",
    (_GENERIC, 0x05): "aborted due to power loss",
    (_GENERIC, 0x06): "internal error",
    (_GENERIC, 0x07): "abort requested",
    (_GENERIC, 0x08): "aborted: submission queue deleted",
    (_GENERIC, 0x0B): "invalid namespace or format",
    (_GENERIC, 0x20): "namespace is write protected",
    (_GENERIC, 0x21): "command interrupted",
    (_GENERIC, 0x22): "transient transport error",
    (_GENERIC, 0x80): "LBA out of range",
    (_GENERIC, 0x81): "capacity exceeded",
    (_GENERIC, 0x82): "namespace not ready",
    (_GENERIC, 0x83): "reservation conflict",
    (_GENERIC, 0x84): "format in progress",
    (_COMMAND_SPECIFIC, 0x80): "conflicting attributes",
    (_COMMAND_SPECIFIC, 0x82): "attempted write to a read-only range",
    (_COMMAND_SPECIFIC, 0x83): "command size limit exceeded",
    (_MEDIA, 0x80): "write fault",
    (_MEDIA, 0x81): "unrecovered read error",
    (_MEDIA, 0x82): "guard check error",
    (_MEDIA, 0x83): "application tag check error",
    (_MEDIA, 0x84): "reference tag check error",
    (_MEDIA, 0x86): "access denied",
    (_MEDIA, 0x87): "deallocated or unwritten block",
}
_ERRNOS = {
    (_GENERIC, 0x20): errno.EROFS,
    (_COMMAND_SPECIFIC, 0x82): errno.EROFS,
    (_GENERIC, 0x81): errno.ENOSPC,
}
_TRANSIENT = frozenset(
    {(_GENERIC, 0x04), (_GENERIC, 0x07), (_GENERIC, 0x21), (_GENERIC, 0x22), (_GENERIC, 0x82)}
)


def is_worth_repeating(result: int) -> bool:
    """Whether the same command may succeed when it is sent again."""
    if result < 0:
        return -result in (errno.EAGAIN, errno.EINTR)
    code = _code(result)
    return not result & _DO_NOT_RETRY and (code in _TRANSIENT or code[0] == _PATH)


def as_os_error(result: int, operation: str) -> OSError:
    """What a result other than 0 means; `operation` says what was done."""
    if result < 0:
        return OSError(-result, f"{operation}: {os.strerror(-result)}")
    code = _code(result)
    words = _WORDS.get(code, "path to the device lost" if code[0] == _PATH else "unknown status")
    return OSError(
        _ERRNOS.get(code, errno.EIO), f"{operation}: {words} (NVMe status {result & 0x7FF:#05x})"
    )


def _code(result: int) -> tuple[int, int]:
    """Status code type and status code."""
    return result >> 8 & 0x7, result & 0xFF
