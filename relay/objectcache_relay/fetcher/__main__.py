"""`python -m objectcache_relay.fetcher`: run one fetcher until it is told to stop."""

from __future__ import annotations

import logging
import os
import stat
import sys
from pathlib import Path

from objectcache_encodings.frames import ENCODINGS
from objectcache_relay.decoding.worker_pool import WorkerPool
from objectcache_relay.landing.asked_encodings import AUTO
from objectcache_relay.relay_process import ForwardingProcess, run_command
from objectcache_relay.sessions import EngineSocket
from objectcache_runtime.networking.listening import HostPort
from objectcache_runtime.settings import Settings
from objectcache_schemas.errors import InvalidRequest

WRITTEN_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH  # who connects to a socket writes to it
ENTERED_BY_OTHERS = stat.S_IXGRP | stat.S_IXOTH

logger = logging.getLogger("objectcache.fetcher")


class FetcherProcess(ForwardingProcess):
    """A fetcher: engines of its host alone, whose memory workers write into."""

    name = "fetcher"
    description = (
        "Run ObjectCache's fetcher: decodes deliveries into the memory of this host's engines."
    )

    without_effect = tuple(
        f"relay.{key}"
        for key in (
            *("listen", "metrics_listen", "log_level", "dispatch", "dispatch_token_file", "url"),
            *("storage_nic_gbps", "compute_nic_gbps", "compute_nics", "report_s"),
        )
    )

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        check_encodings(settings.fetcher.encodings)
        check_listen(settings.fetcher.listen)
        check_cpus(settings.fetcher.cpus)
        check_users(settings.fetcher.users, settings.storage.target_socket_mode)

    def prepare(self, listening: HostPort, scheme: str) -> None:
        """Say what keeps engines of others from the socket."""
        directory, own = self.settings.run_dir, self.settings.fetcher
        if _others(own.users) and not _is_entered_by_others(directory):
            logger.warning(
                "users of fetcher.users cannot enter server.run_dir %s: chmod 711 it", directory
            )

    @property
    def listen(self) -> str:
        return self.settings.fetcher.listen

    @property
    def metrics_listen(self) -> str:
        return self.settings.fetcher.metrics_listen

    @property
    def log_level(self) -> str:
        return self.settings.fetcher.log_level

    @property
    def engines(self) -> EngineSocket:
        users = {os.getuid(), *map(int, self.settings.fetcher.users)}
        return EngineSocket(self.settings.fetcher_socket, frozenset(users))

    async def pool(self) -> WorkerPool:
        own = self.settings.fetcher
        pool = WorkerPool(
            own.workers, [int(cpu) for cpu in own.cpus], self.settings.relay.fabric_timeout_s
        )
        await pool.start()
        return pool


def check_encodings(encodings: tuple[str, ...]) -> None:
    """Raise `InvalidRequest` for a name of none."""
    if encodings == (AUTO,):
        return
    if wrong := [name for name in encodings if name not in ENCODINGS]:
        raise InvalidRequest(
            f"fetcher.encodings must be {AUTO}, or some of {', '.join(ENCODINGS)}, or none, got "
            f"{wrong[0]!r}"
        )


def check_listen(listen: str) -> None:
    """Raise `InvalidRequest` for an address that other hosts reach."""
    if not HostPort.parse("fetcher.listen", listen).is_loopback:
        raise InvalidRequest(
            f"fetcher.listen is {listen}: a fetcher serves engines of its own host; give an "
            "address of the loopback"
        )


def check_users(users: tuple[str, ...], socket_mode: str) -> None:
    """Raise `InvalidRequest` for users who may join and cannot reach the socket."""
    others = _others(users)
    if others and not int(socket_mode, 8) & WRITTEN_BY_OTHERS:
        raise InvalidRequest(
            f"fetcher.users names user {others[0]}, who cannot reach the socket with "
            f"storage.target_socket_mode={socket_mode}: set storage.target_socket_mode=666, too"
        )


def _others(users: tuple[str, ...]) -> list[str]:
    """Whom the system may keep from what is this process's."""
    return [user for user in users if int(user) not in (0, os.getuid())]


def _is_entered_by_others(directory: Path) -> bool:
    try:
        return bool(directory.stat().st_mode & ENTERED_BY_OTHERS)
    except OSError:
        return False  # it is made for this process alone


def check_cpus(cpus: tuple[str, ...]) -> None:
    """Raise `InvalidRequest` for processors that this process may not use."""
    usable = os.sched_getaffinity(0)
    if wrong := [cpu for cpu in cpus if int(cpu) not in usable]:
        known = ",".join(map(str, sorted(usable)))
        raise InvalidRequest(
            f"fetcher.cpus: this process may not use {', '.join(wrong)}; it may use {known}"
        )


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    return run_command(FetcherProcess, arguments, os.environ)


if __name__ == "__main__":
    sys.exit(main())
