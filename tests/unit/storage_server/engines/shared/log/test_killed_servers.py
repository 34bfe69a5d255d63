"""A server that is killed loses nothing that it acknowledged, and its index goes on from there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from objectcache_storage_server.engines.shared.log.log_catalog import LogCatalog
from objectcache_storage_server.engines.stores.folder.folder_store import FolderStore
from tests.unit.storage_server.engines.shared.catalogs import BUCKET, soon

REPOSITORY = Path(__file__).parents[6]
INDEX_BYTES = 1 << 28


class SharedFolder:
    """A store, and an index that servers leave behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = folder / "index"
        self.store = FolderStore(folder / "store", create=True)
        catalog = LogCatalog(self.store, folder / "first", index_bytes_max=INDEX_BYTES)
        self.bucket = catalog.change(lambda change: change.add_bucket(BUCKET), soon())
        with catalog.reading() as view:
            self.end = view.state.end
        catalog.close()

    def start(self, moment: str, number: int) -> subprocess.Popen[str]:
        """A server of its own process."""
        module = "tests.unit.storage_server.engines.shared.log.killed_server"
        arguments = [str(self.folder / "store"), str(self.index), moment, str(number)]
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
        )

    def keys(self, index: Path) -> tuple[list[str], object]:
        """What a server with this index finds, and all that it says of versions and extents."""
        catalog = LogCatalog(self.store, index, index_bytes_max=INDEX_BYTES)
        try:
            catalog.follow(soon())
            with catalog.reading() as view:
                versions = view.every_version(None, 1 << 30)
                contents = (versions, view.extents(None, 1 << 30), view.totals(self.bucket))
                return [version.info.key for version in versions], contents
        finally:
            catalog.close()


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[SharedFolder]:
    folder = SharedFolder(tmp_path)
    yield folder
    folder.store.close()


@pytest.mark.parametrize(("moment", "unacknowledged"), [("before", 0), ("after", 1)])
def test_a_server_that_ends_around_an_append_goes_on_with_its_index(
    shared: SharedFolder, moment: str, unacknowledged: int
) -> None:
    with shared.start(moment, shared.end + 4) as server:
        told, _ = server.communicate(timeout=60)
    assert server.returncode == 9
    acknowledged = told.split()
    assert len(acknowledged) == 3  # the first record enters the server in the log
    (index,) = shared.index.glob("*/whole")
    found, contents = shared.keys(shared.index)
    assert found[:3] == acknowledged
    assert len(found) == 3 + unacknowledged
    assert index.exists()  # it was used again
    assert shared.keys(shared.folder / "fresh") == (found, contents)


def test_a_server_that_is_killed_at_any_moment_goes_on_with_its_index(
    shared: SharedFolder,
) -> None:
    acknowledged: list[str] = []
    for _ in range(3):
        with shared.start("never", 0) as server:
            assert server.stdout is not None
            for line in server.stdout:
                acknowledged.append(line.strip())
                if len(acknowledged) % 20 == 0:
                    server.kill()
                    break
            acknowledged += server.stdout.read().split()
    found, contents = shared.keys(shared.index)
    assert set(acknowledged) <= set(found)
    assert len(found) <= len(acknowledged) + 3
    assert shared.keys(shared.folder / "fresh") == (found, contents)
