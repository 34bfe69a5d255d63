"""A data directory is one engine's, and whoever starts waits for one that ends by itself."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import pytest

from objectcache_schemas.errors import Unavailable
from objectcache_storage_server.engines.disk.data_folders import lock_folder

# The parent ends once its child holds the lock; the child when its standard input does.
ORPHAN = """
import os, sys
from pathlib import Path
from objectcache_storage_server.engines.disk.data_folders import lock_folder
read_end, write_end = os.pipe()
if os.fork():
    os.read(read_end, 1)
    os._exit(0)
lock_folder(Path(sys.argv[1]))
os.write(write_end, b"x")
sys.stdin.read()
"""


@pytest.fixture
def orphans_input(tmp_path: Path) -> Iterator[BinaryIO]:
    """What keeps an engine alive that holds tmp_path, and whose parent has ended."""
    read_end, write_end = os.pipe()
    subprocess.run([sys.executable, "-c", ORPHAN, tmp_path], stdin=read_end, check=True)
    os.close(read_end)
    with open(write_end, "wb") as given:
        yield given


class Heard(logging.Handler):
    """Tells when a line is logged that has these words."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self.words = words
        self.event = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if self.words in record.getMessage():
            self.event.set()


def test_an_engine_whose_parent_has_gone_is_waited_for(
    tmp_path: Path, orphans_input: BinaryIO, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    heard = Heard("whose supervisor has gone")
    logging.getLogger().addHandler(heard)
    try:
        with ThreadPoolExecutor(1) as thread:
            locking = thread.submit(lock_folder, tmp_path, 60.0)
            assert heard.event.wait(30.0)
            assert not locking.done()
            orphans_input.close()
            os.close(locking.result())
    finally:
        logging.getLogger().removeHandler(heard)


def test_one_that_does_not_end_is_waited_for_no_longer_than_is_said(
    tmp_path: Path, orphans_input: BinaryIO
) -> None:
    with pytest.raises(Unavailable, match="in use by another storage server"):
        lock_folder(tmp_path, 0.2)


def test_one_that_has_its_parent_is_not_waited_for(tmp_path: Path) -> None:
    held = lock_folder(tmp_path)
    with pytest.raises(Unavailable, match="in use by another storage server"):
        lock_folder(tmp_path, float("inf"))
    os.close(held)
