"""A server for the suite, on loopback, with the suite's users."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.s3_tests.accounts import AddedUser, add_user
from tests.s3_tests.certificate import make_certificate
from tests.s3_tests.configuration import LIFECYCLE_DAY_S, REGION, USERS
from tests.servers import RunningServer, running_server

SETTINGS = (
    "gateway.log_level=warning",
    f"gateway.region={REGION}",
    "gateway.acls=true",  # off by default; the suite shares and publishes what it tests
    "storage.log_level=warning",
    f"storage.lifecycle_day_s={LIFECYCLE_DAY_S}",
    "storage.lifecycle_interval_s=1",
)


class ServerUnderTest:
    """A running server and its users."""

    def __init__(self, server: RunningServer, users: dict[str, AddedUser], trust: Path | None):
        self.users = users
        self.certificate_file = trust
        self._server = server

    @property
    def endpoint(self) -> str:
        """Its URL."""
        return self._server.endpoint

    def ended_processes(self) -> list[str]:
        """Processes that ended by themselves, with their exit status."""
        processes = {"gateway": self._server.gateway, "storage server": self._server.storage}
        return [
            f"{name} ({process.returncode})"
            for name, process in processes.items()
            if process.returncode is not None
        ]

    def log_tail(self) -> str:
        """The end of what its processes logged."""
        return self._server.gateway.log_tail() + self._server.storage.log_tail()


@contextmanager
def server_under_test(folder: Path, scheme: str) -> Iterator[ServerUnderTest]:
    """A server below `folder` for the length of a `with` block."""
    settings, trust = list(SETTINGS), None
    if scheme == "https":
        certificate = make_certificate(folder)
        trust = certificate.certificate_file
        settings.append(f"gateway.tls_certificate={trust}")
        settings.append(f"gateway.tls_key={certificate.key_file}")
    with running_server(folder / "data", *settings) as server:
        users = {section: add_user(server, name) for section, name in USERS.items()}
        yield ServerUnderTest(server, users, trust)
