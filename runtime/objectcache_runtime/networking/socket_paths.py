"""How long the path of a unix socket may be."""

from __future__ import annotations

import os
from pathlib import Path

from objectcache_schemas.errors import InvalidRequest

SOCKET_PATH_BYTES_MAX = 107  # sockaddr_un, less its closing NUL


def check_socket_path(path: Path) -> None:
    """Raise `InvalidRequest` for a path that no socket can have."""
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise InvalidRequest(
            f"the socket path {path} is over {SOCKET_PATH_BYTES_MAX} bytes; "
            "set server.run_dir to a shorter directory"
        )
