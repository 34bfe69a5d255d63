"""Names of files that outlive a power loss."""

from __future__ import annotations

import os
from pathlib import Path


def flush_directory(directory: Path) -> None:
    """Make the names in a directory outlive a power loss. Raises `OSError`."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
