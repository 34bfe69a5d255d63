"""Where one run of the benchmark works, and how much it measures."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.basis.scale import Scale
from benchmarks.basis.server import Server, running_server
from benchmarks.basis.store import Store, opened_store


class Bench:
    """Gives out stores and servers below `folder`; the data of each goes with it."""

    def __init__(self, folder: Path, scale: Scale) -> None:
        self.folder = folder
        self.scale = scale
        self._numbers = itertools.count()

    @contextmanager
    def place(self) -> Generator[Path]:
        """An empty folder, removed at the end."""
        folder = self.folder / f"{next(self._numbers):03d}"
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder)

    @contextmanager
    def store(self, **storage: object) -> Generator[Store]:
        """A store in this process, with settings of `storage`."""
        with self.place() as folder, opened_store(folder / "store", **storage) as store:
            yield store

    @contextmanager
    def server(self, *assignments: str) -> Generator[Server]:
        """A server, with settings `section.key=value`."""
        with self.place() as folder, running_server(folder / "data", *assignments) as server:
            yield server
