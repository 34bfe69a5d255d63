"""The servers under attack: what they hold before and after, and whether they said anything."""

from __future__ import annotations

import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import boto3
import psutil

from tests.fuzz.heads import BUCKET
from tests.servers import RunningServer, start_server

# Bounds that are short, so that what is never completed ends within a run.
SETTINGS = (
    "gateway.body_stall_timeout_s=2",
    "gateway.keepalive_timeout_s=2",
    "gateway.log_level=warning",
    "storage.log_level=warning",
    "storage.data_file_bytes=67108864",
    "storage.capacity_bytes=1073741824",
    "scheduler.queue_timeout_s=1",
)
MIB = 1 << 20
GROWTH_BYTES_MAX = 48 * MIB  # of a process after its warm-up: allocators round up
SETTLE_S = 20.0  # a server that is held up has not yet closed what its clients have left
DESCRIPTORS_MORE_MAX = 40  # open files that the engine keeps, and connections in a pool


@dataclass(frozen=True, slots=True)
class Reading:
    """What one process holds."""

    resident_bytes: int
    descriptors: int
    threads: int

    def __str__(self) -> str:
        held = f"{self.resident_bytes / MIB:.0f} MiB, {self.descriptors} descriptors"
        return f"{held}, {self.threads} threads"


@dataclass(frozen=True, slots=True)
class Servers:
    """A gateway and a storage server with one bucket, an object and the root key pair."""

    running: RunningServer
    access_key: str
    secret_key: str = field(repr=False)

    def readings(self) -> dict[str, Reading]:
        """By process."""
        return {name: _read(pid) for name, pid in self._pids().items()}

    def defects(self, before: dict[str, Reading]) -> list[str]:
        """What is wrong now: a process that ended, a traceback in a log, growth since `before`."""
        found = [name for name, pid in self._pids().items() if not psutil.pid_exists(pid)]
        wrong = [f"the {name} has ended" for name in found]
        for log in ("gateway.log", "storage.log"):
            text = (self.running.data_dir / log).read_text(errors="replace")
            if "Traceback" in text or "Fatal Python error" in text:
                start = max(0, text.find("Traceback") - 300)
                wrong.append(f"{log} holds a traceback:\n{text[start : start + 4000]}")
        if found:
            return wrong
        wrong += self._growth(before)
        if self._health() != 200:
            wrong.append("the health path does not answer 200")
        return wrong

    def _growth(self, before: dict[str, Reading]) -> list[str]:
        """What grew since `before`, once the servers had time to see which clients are gone."""
        deadline_s = time.monotonic() + SETTLE_S
        pause = threading.Event()
        while True:
            grown = [
                f"the {name} grew from {before[name]} to {now}"
                for name, now in self.readings().items()
                if now.resident_bytes - before[name].resident_bytes > GROWTH_BYTES_MAX
                or now.descriptors - before[name].descriptors > DESCRIPTORS_MORE_MAX
            ]
            if not grown or time.monotonic() > deadline_s:
                return grown
            pause.wait(0.1)

    def _pids(self) -> dict[str, int]:
        return {"gateway": self.running.gateway_pid, "storage server": self.running.storage_pid}

    def _health(self) -> int:
        try:
            with urllib.request.urlopen(f"{self.running.endpoint}/healthz", timeout=20) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        except OSError:
            return 0


def _read(pid: int) -> Reading:
    process = psutil.Process(pid)
    with process.oneshot():
        return Reading(process.memory_info().rss, process.num_fds(), process.num_threads())


@contextmanager
def served() -> Iterator[Servers]:
    """Fresh servers in a directory of their own, gone afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="objectcache-fuzz-") as directory,
        start_server(Path(directory) / "data", *SETTINGS) as running,
    ):
        credentials = running.credentials
        make_client = boto3.client
        s3 = make_client(
            "s3",
            endpoint_url=running.endpoint,
            aws_access_key_id=credentials.access_key,
            aws_secret_access_key=credentials.secret_key,
            region_name="us-east-1",
        )
        s3.create_bucket(Bucket=BUCKET)
        s3.put_object(Bucket=BUCKET, Key="k", Body=b"0123456789" * 1000)
        s3.close()
        yield Servers(running, credentials.access_key, credentials.secret_key)
