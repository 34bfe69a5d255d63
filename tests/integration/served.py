"""`objectcache serve` as a user starts it, for tests: on a free port, stopped by its pid."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import psutil
from botocore.config import Config

from objectcache.channel.credentials_file import read_credentials
from objectcache_schemas.errors import DeliveryFailed, Unavailable
from tests.s3_clients import boto3_client
from tests.servers import DATA_FILES

BOUND_S = 60.0  # for whatever a test waits for; generous, because machines may be busy
MODULES = ("objectcache_gateway", "objectcache_gateway.admin", "objectcache_storage_server")
T = TypeVar("T")
QUIET_SETTINGS = ("gateway.log_level=warning", "storage.log_level=warning")


def own_environment() -> dict[str, str]:
    """The environment without settings and credentials that the developer may have set."""
    return {name: text for name, text in os.environ.items() if not name.startswith("OBJECTCACHE_")}


class Served:
    """A running server: `endpoint`, `credentials`, and the processes behind it."""

    def __init__(
        self,
        data_dir: Path,
        *arguments: str,
        listen: str = "127.0.0.1:0",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.data_dir = data_dir
        self._errors = data_dir.parent / f"{data_dir.name}.stderr"
        with self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "objectcache_operations", "serve"),
                    *("--data-dir", str(data_dir), "--listen", listen),
                    *("--set", DATA_FILES, *arguments),
                ],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=own_environment() | dict(variables or {}),
            )
        self.printed: list[str] = []
        self.endpoint = ""

    def wait_ready(self) -> None:
        """Read what it announces. Where that is not what it should be it is ended."""
        assert self.process.stdout is not None
        try:
            self.printed = [self.process.stdout.readline().rstrip("\n") for _ in range(4)]
            assert self.printed[0].startswith("ready http"), (self.printed, self.errors())
        except BaseException:
            self.__exit__()
            raise
        self.endpoint = self.printed[0].removeprefix("ready ")

    @property
    def credentials(self) -> tuple[str, str]:
        """Access key and secret."""
        return read_credentials(self.data_dir / "root-credentials")

    def s3(self) -> Any:
        """A boto3 client that neither retries nor waits long."""
        access_key, secret_key = self.credentials
        return boto3_client(
            endpoint_url=self.endpoint,
            aws_access_key_id=access_key,
            aws_secret_access_key=secret_key,
            region_name="us-east-1",
            config=Config(
                signature_version="s3v4",  # of presigned URLs too
                retries={"total_max_attempts": 1},
                read_timeout=BOUND_S,
            ),
        )

    def health_status(self) -> int:
        """HTTP status of the health path; 0 when nobody answers."""
        try:
            with urllib.request.urlopen(f"{self.endpoint}/healthz", timeout=BOUND_S) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        except OSError:
            return 0

    def children(self) -> dict[str, int]:
        """Pids of the running servers by module name."""
        found: dict[str, int] = {}
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                for module in MODULES:
                    if module in child.cmdline():
                        found[module] = child.pid
        return found

    def gateway_pids(self) -> dict[int, int]:
        """Pids of the running gateways by their number; one that is being replaced has two."""
        found: dict[int, int] = {}
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                line = child.cmdline()
                if "objectcache_gateway" in line:
                    found[int(line[line.index("--number") + 1])] = child.pid
        return found

    def errors(self) -> str:
        """Everything on standard error so far."""
        return self._errors.read_text()

    def wait_exit(self) -> int:
        """Exit code, once it has ended by itself."""
        return self.process.wait(BOUND_S)

    def stop(self) -> int:
        """SIGTERM, and its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait_exit()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(self.process.pid).children()
            self.process.kill()
            _, alive = psutil.wait_procs(children, timeout=BOUND_S)
            for child in alive:
                child.kill()
        if self.process.stdout is not None and not self.process.stdout.closed:
            self.process.communicate()


def wait_until(condition: Callable[[], bool], what: str, bound_s: float = BOUND_S) -> None:
    """Ask until it holds; processes that are not ours to wait for tell us no other way."""
    deadline_s = time.monotonic() + bound_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {bound_s} s for {what}"
        pause.wait(0.02)


def begun_in_time(begin: Callable[[float], T], timeouts_s: Sequence[float] = (0.2, 2.0, 20.0)) -> T:
    """What `begin` returns of the first of these timeouts within which it comes so far: for a test
    that waits for a timeout, before which a busy machine may not even have begun. It must leave
    nothing behind where it does not come so far.
    """
    for timeout_s in timeouts_s[:-1]:
        try:
            return begin(timeout_s)
        except (Unavailable, DeliveryFailed):
            continue
    return begin(timeouts_s[-1])
