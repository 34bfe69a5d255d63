"""A file that says which host has a data directory open, for file systems that several may mount.

A lock of the system holds between hosts on some of them and on others not. So whoever opens the
directory makes this file, and writes it anew every few seconds. A file of another host that does
not change while it is watched is a dead server's. One of this host is a dead server's in any case:
the lock, which holds on one host, was free. Nothing here compares clocks of hosts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from objectcache_schemas.errors import Unavailable
from objectcache_storage_server.engines.disk.system_errors import translated

LEASE = "lease"
RENEW_S = 5.0
DEAD_AFTER_S = 20.0  # without a change; several renewals, since a busy mount delays them
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

log = logging.getLogger("objectcache.storage_server.engines.disk")


def this_host() -> str:
    """This host since it was started, and its name."""
    return f"{BOOT_ID.read_text().strip()} {platform.node()}"


class HostLease:
    """Takes the lease of `folder`, which takes `dead_after_s` where another host's is left over.

    Raises `Unavailable` where another host has it. `lost` is called once, from a thread, when
    another host has taken it: this one stood still for too long, and must change nothing more.
    """

    def __init__(
        self,
        folder: Path,
        lost: Callable[[str], None],
        *,
        host: str,
        renew_s: float = RENEW_S,
        dead_after_s: float = DEAD_AFTER_S,
    ) -> None:
        self._path = folder / LEASE
        self._lost = lost
        self._host = host
        self._renew_s = renew_s
        self._dead_after_s = dead_after_s
        self._token = uuid.uuid4().hex
        self._count = 0
        with translated("take the lease of the data directory", self._path):
            while not self._made():
                self._remove_left_over()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="host-lease", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Give the lease back."""
        self._closed.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            if self._is_ours(self._path.read_text()):
                self._path.unlink()

    def _made(self) -> bool:
        try:
            with open(self._path, "x") as file:
                file.write(self._content())
        except FileExistsError:
            return False
        return True

    def _content(self) -> str:
        return f"{self._host}\nprocess {os.getpid()} {self._token}\n{self._count}\n"

    def _is_ours(self, content: str) -> bool:
        return self._token in content

    def _remove_left_over(self) -> None:
        """Return when the file may be made again; raises `Unavailable` where it is alive."""
        try:
            seen = self._path.read_text()
        except FileNotFoundError:
            return
        if not _is_of_host(seen, self._host):
            self._watch(seen)
        taken = self._path.with_name(f"{LEASE}-{self._token}")
        try:
            os.rename(self._path, taken)
        except FileNotFoundError:
            return
        is_alive = taken.read_text() != seen
        if is_alive:  # somebody else was quicker
            with contextlib.suppress(FileExistsError):
                os.link(taken, self._path)
        taken.unlink()
        if is_alive:
            raise self._in_use(seen)

    def _watch(self, seen: str) -> None:
        log.warning(
            "the data directory has the lease of another host (%s); waiting %g s to see whether "
            "that server is alive",
            _name_of(seen),
            self._dead_after_s,
        )
        end_s = time.monotonic() + self._dead_after_s
        while (left_s := end_s - time.monotonic()) > 0:
            time.sleep(min(left_s, self._renew_s / 2))
            try:
                content = self._path.read_text()
            except FileNotFoundError:
                return
            if content != seen:
                raise self._in_use(content)

    def _in_use(self, content: str) -> Unavailable:
        return Unavailable(
            f"{self._path.parent} is in use by a storage server on the host {_name_of(content)}: "
            "stop that one, or set another server.data_dir"
        )

    def _run(self) -> None:
        while not self._closed.wait(self._renew_s):
            try:
                self._renew()
            except OSError as error:
                log.warning("the lease of the data directory was not renewed: %s", error)
            except Unavailable as error:
                log.error("%s", error)
                self._lost(str(error))
                return

    def _renew(self) -> None:
        """Through one descriptor: whoever takes the lease between the look and the write has made
        another file, which is not written to.
        """
        content = ""
        with contextlib.suppress(FileNotFoundError), open(self._path, "r+") as file:
            content = file.read()
            if self._is_ours(content):
                self._count += 1
                file.seek(0)
                file.write(self._content())
        if not self._is_ours(content):
            raise Unavailable(
                f"the lease of the data directory was taken by {_name_of(content)} while this "
                "server stood still"
            )


def _is_of_host(content: str, host: str) -> bool:
    return content.partition(" ")[0] == host.partition(" ")[0]


def _name_of(content: str) -> str:
    """The host's name, for people."""
    return content.partition("\n")[0].partition(" ")[2] or "another host"
