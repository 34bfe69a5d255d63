"""Where the stores of the engines' tests lie."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

IN_MEMORY = Path("/dev/shm")
NEEDS_A_DEVICE = frozenset(
    {"local", "local-direct", "local-threads", "local-encoded-direct"}
)  # for O_DIRECT


@pytest.fixture(scope="session")
def store_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """The folder of an engine by its name, for `opened_engine`. In memory where the engine does
    there what it does on a device: flushing is most of what these tests would wait for.
    """
    on_device = tmp_path_factory.mktemp("stores")
    with tempfile.TemporaryDirectory(
        prefix="objectcache-test-", dir=IN_MEMORY if IN_MEMORY.is_dir() else None
    ) as in_memory:
        yield lambda name: (on_device if name in NEEDS_A_DEVICE else Path(in_memory)) / name
