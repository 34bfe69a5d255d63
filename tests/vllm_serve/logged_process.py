"""A server of another project's as a process group of its own, ended by its id.

What it prints goes to a file.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

READY_TIMEOUT_S = 600.0  # on a quiet machine half a minute
STOP_TIMEOUT_S = 30.0
ANSWER_TIMEOUT_S = 300.0
POLL_S = 0.1
LOG_TAIL_BYTES = 12_000


class LoggedProcess:
    """Started at once; `wait_ready` returns when it serves. `folder` is its working directory."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], folder: Path
    ) -> None:
        self._name = Path(command[0]).name
        self.log_file = folder / f"{self._name}.log"
        with self.log_file.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=folder,
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        """Whether the process that was started has not ended."""
        return self._process.poll() is None

    @property
    def log(self) -> str:
        """All that it printed."""
        return self.log_file.read_text(errors="replace")

    def wait_ready(self, health_url: str) -> None:
        """Return when that is answered; fails with the log's end where it is not."""
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while not _answers(health_url):
            late = time.monotonic() > deadline_s
            if late or not self.running:
                tail = self.log[-LOG_TAIL_BYTES:]
                self.stop()
                raise AssertionError(f"{self._name} {'is not ready' if late else 'ended'}\n{tail}")
            time.sleep(POLL_S)

    def stop(self) -> None:
        """End the whole group, with force where asking does not help in time."""
        if self.running:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(STOP_TIMEOUT_S)


def own_environment(folder: Path, modules: Sequence[str] = ()) -> dict[str, str]:
    """No setting that the developer may have, a home in `folder`, and modules from these places."""
    passed_on = {
        name: text for name, text in os.environ.items() if not name.startswith(_NOT_PASSED_ON)
    }
    places = filter(None, (*modules, passed_on.get("PYTHONPATH")))
    return passed_on | {"HOME": str(folder), "PYTHONPATH": os.pathsep.join(places)}


_NOT_PASSED_ON = ("OBJECTCACHE_", "VLLM_", "LMCACHE_", "AWS_", "PYTHONDONTWRITEBYTECODE")


def opened(request: str | urllib.request.Request) -> str:
    """What a server answers; fails where it refuses."""
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as reply:
            body: bytes = reply.read()
            return body.decode()
    except urllib.error.HTTPError as error:
        with error:
            raise AssertionError(f"{error}: {error.read().decode()[:500]}") from None


def _answers(url: str) -> bool:
    try:
        opened(url)
    except (OSError, AssertionError):
        return False
    return True
