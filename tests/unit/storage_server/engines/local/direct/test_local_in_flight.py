"""A file is not opened for direct requests while another opening's may be in flight."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from objectcache_storage_server.engines.local.direct import in_flight


def test_a_second_opening_waits_until_the_first_one_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    first, second = os.open(path, os.O_RDWR), os.open(path, os.O_RDWR)
    in_flight.lock_when_idle(first)
    locked = threading.Event()

    def lock() -> None:
        in_flight.lock_when_idle(second)
        locked.set()

    waiting = threading.Thread(target=lock)
    waiting.start()
    assert not locked.is_set()
    os.close(first)
    waiting.join()
    assert locked.is_set()
    os.close(second)


def test_it_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "LOCK_TIMEOUT_S", 0.05)
    path = tmp_path / "file"
    path.touch()
    first, second = os.open(path, os.O_RDWR), os.open(path, os.O_RDWR)
    in_flight.lock_when_idle(first)
    with pytest.raises(BlockingIOError):
        in_flight.lock_when_idle(second)
    os.close(first)
    os.close(second)
