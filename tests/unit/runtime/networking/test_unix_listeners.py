"""A socket's path belongs to whoever uses it, and to nobody once that has ended."""

from __future__ import annotations

import fcntl
import re
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from objectcache_runtime.networking.unix_listeners import (
    LOCK_SUFFIX,
    UnixListener,
    open_unix_listener,
)
from objectcache_schemas.errors import InvalidRequest, Unavailable

SETTING = "server.run_dir"


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="oc-unix-") as directory:  # pytest's are too long
        yield Path(directory) / "made" / "a.sock"


def opened(path: Path, mode: int = 0o600) -> UnixListener:
    return open_unix_listener(path, mode, 4, SETTING)


def answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        try:
            asking.connect(str(path))
        except OSError:
            return False
        return True


def test_it_listens_with_its_mode_in_a_directory_that_it_makes(path: Path) -> None:
    listener = opened(path, 0o660)
    with listener.socket:
        assert answers(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        listener.leave()


def test_a_path_in_use_is_refused_and_goes_on_being_served(path: Path) -> None:
    first = opened(path)
    with first.socket:
        with pytest.raises(Unavailable, match=r"another process listens.*server\.run_dir"):
            opened(path)
        assert answers(path)
        first.leave()
    second = opened(path)
    second.leave()
    second.socket.close()
    assert not path.exists()


def test_whoever_listens_without_a_lock_is_left_alone(path: Path) -> None:
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(path))
        other.listen(0)
        for _ in range(3):  # its backlog is full after the first
            with pytest.raises(Unavailable, match="another process listens"):
                opened(path)
        assert path.exists()


def test_a_lock_counts_before_there_is_a_socket(path: Path) -> None:
    path.parent.mkdir()
    with path.with_name(path.name + LOCK_SUFFIX).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Unavailable, match="another process listens"):
            opened(path)


HOLDER = """
import os, sys
from pathlib import Path
from objectcache_runtime.networking.unix_listeners import open_unix_listener
listener = open_unix_listener(Path(sys.argv[1]), 0o600, 4, "server.run_dir")
print("holds", flush=True)
os.read(0, 1)
"""


def test_what_a_killed_process_left_is_taken_over(path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"holds\n"
        holder.kill()
    assert path.exists()
    listener = opened(path)
    with listener.socket:
        assert answers(path)
        listener.leave()
        listener.leave()


def test_leaving_takes_away_no_others_socket(path: Path) -> None:
    first = opened(path)
    first.leave()
    second = opened(path)
    first.leave()
    assert answers(path)
    for listener in (first, second):
        listener.leave()
        listener.socket.close()


def test_what_stands_in_the_way_is_named_with_the_setting(path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"server\.run_dir"):
        opened(path.with_name("x" * 120))
    path.parent.write_text("a file")
    made = f"the directory {path.parent} cannot be made: File exists; server.run_dir says"
    with pytest.raises(Unavailable, match=re.escape(made)):
        opened(path)
    path.parent.unlink()
    path.mkdir(parents=True)
    with pytest.raises(Unavailable, match=r"cannot listen on .*server\.run_dir"):
        opened(path)
    path.rmdir()
