"""A driver in another process: its own Python, its own HOME, and names that resolve to loopback."""

from __future__ import annotations

import os
import pickle
import select
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tests.clients.driver import Endpoint, NotOffered
from tests.clients.host import ANSWER, NOT_OFFERED

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 100.0
# Mounts a hosts file over the real one, for this process and what it starts alone.
_WITH_HOSTS = ("unshare", "--map-root-user", "--mount", "sh", "-c")
_MOUNT = 'mount --bind "$1" /etc/hosts && shift && exec "$@"'


class ClientRefused(Exception):
    """The client reported an error; the text is the client's."""


class RemoteDriver:
    """The methods of `S3Driver`, each a call into the other process."""

    def __init__(
        self,
        driver: str,
        python: Path,
        endpoint: Endpoint,
        workspace: Path,
        host_names: Sequence[str] = (),
    ) -> None:
        workspace.mkdir()
        self._errors = workspace.with_suffix(".stderr")
        command = [str(python), "-m", "tests.clients.host", driver]
        if host_names:
            hosts = workspace.with_suffix(".hosts")
            hosts.write_text(f"127.0.0.1 localhost {' '.join(host_names)}\n")
            command = [*_WITH_HOSTS, _MOUNT, "sh", str(hosts), *command]
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                env=client_environment(workspace, endpoint.ca_file),
            )
        try:
            self.cannot_name: Mapping[str, str] = self.call("__init__", endpoint, workspace)
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *arguments: Any) -> Any:
        """The method's value; raises `ClientRefused` or `NotOffered`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump((method, arguments), self._process.stdin)
        self._process.stdin.flush()
        readable, _, _ = select.select([self._process.stdout], [], [], TIMEOUT_S)
        assert readable, f"{method} took over {TIMEOUT_S} s\n{self._log()}"
        try:
            outcome, value = pickle.load(self._process.stdout)
        except EOFError:
            raise AssertionError(f"the client's process has ended\n{self._log()}") from None
        if outcome == ANSWER:
            return value
        raise NotOffered(value) if outcome == NOT_OFFERED else ClientRefused(value)

    def _log(self) -> str:
        return self._errors.read_bytes()[-4000:].decode(errors="replace")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def client_environment(home: Path, ca_file: str | None) -> dict[str, str]:
    """An environment without what the developer has set for such clients."""
    authority = {"AWS_CA_BUNDLE": ca_file, "SSL_CERT_FILE": ca_file} if ca_file else {}
    return {
        **authority,
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",
    }


def names_can_be_mounted() -> bool:
    """Whether this machine lets a process have an /etc/hosts of its own."""
    try:
        done = subprocess.run(
            [*_WITH_HOSTS, _MOUNT, "sh", "/etc/hosts", "true"], capture_output=True, check=False
        )
    except OSError:
        return False
    return done.returncode == 0
