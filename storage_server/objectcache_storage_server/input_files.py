"""Text files that a user names on a command line."""

from __future__ import annotations

from pathlib import Path

from objectcache_schemas.errors import InvalidRequest


def read_text(file: Path, bytes_max: int) -> str:
    """Its UTF-8 text, without a byte order mark.

    Raises `InvalidRequest` where it cannot be read, is larger than `bytes_max`, or is no text.
    """
    try:
        with file.open("rb") as stream:
            content = stream.read(bytes_max + 1)
    except OSError as error:
        raise InvalidRequest(f"cannot read {file}: {error.strerror}") from error
    if len(content) > bytes_max:
        raise InvalidRequest(f"{file} is larger than {bytes_max >> 20} MiB")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{file} is not UTF-8 text: {error.reason}") from error
