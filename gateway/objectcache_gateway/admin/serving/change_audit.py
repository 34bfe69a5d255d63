"""The admin audit log: a JSON line for each change that was asked for, and how it ended.

It says who, what, from where and the outcome, and of the body what is no secret. The file may be
renamed at any time, and is renamed by itself as the gateway's audit log is.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from objectcache_gateway.audit.audit_file import AuditFile
from objectcache_runtime.logs import clean, utc_time
from objectcache_schemas.operators.admin_api import Body

LINE_BYTES_MAX = 16 << 10
LEFT_OUT = "(left out)"
# Fields of bodies that hold a secret, or one sealed.
SECRET_FIELDS = frozenset({"secret_key", "passphrase", "backup", "token"})

logger = logging.getLogger("objectcache.gateway.admin.audit")


class ChangeAudit:
    """Appends lines to a file that is renamed when it is large. What cannot be written is logged
    and counted; it stops no change.
    """

    def __init__(self, path: Path, bytes_max: int, files_max: int) -> None:
        self._file = AuditFile(path, bytes_max, files_max)
        self._path = path

    @property
    def lost_lines(self) -> int:
        """Lines that could not be written."""
        return self._file.lost_lines

    def write(self, line: bytes) -> None:
        """Append a line, in one piece."""
        lost_before = self.lost_lines
        error = self._file.write([line])
        if error is not None or self.lost_lines > lost_before:
            why = "a part of the line only" if error is None else error.strerror or error
            logger.error(
                "%s cannot be written: %s; %d lines are lost", self._path, why, self.lost_lines
            )

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __repr__(self) -> str:
        return f"<ChangeAudit {self._file!r}>"


def audit_line(
    *,
    now_s: float,
    request_id: str,
    who: str,
    origin: str,
    method: str,
    path: str,
    names: Mapping[str, str],
    asked: Mapping[str, Any],
    status: int,
    code: str,
) -> bytes:
    """One line. `path` is the route's, `names` its parameters, `asked` the body without secrets."""
    line = {
        "time": utc_time(now_s),
        "request_id": request_id,
        "who": who,
        "from": origin,
        "action": f"{method} {path}",
        "names": {name: clean(value) for name, value in names.items()},
        "asked": asked,
        "status": status,
        "code": code,
    }
    encoded = msgspec.json.encode(line)
    if len(encoded) > LINE_BYTES_MAX:
        encoded = msgspec.json.encode({**line, "asked": {"cut": True}})
    return encoded + b"\n"


def without_secrets(body: Body) -> dict[str, Any]:
    """What a body says, its secrets left out."""
    values: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(body))
    return {
        name: LEFT_OUT if name in SECRET_FIELDS and value is not None else value
        for name, value in values.items()
    }
