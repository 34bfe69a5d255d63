"""The server under measurement: `objectcache serve` in a directory of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import psutil
from botocore.config import Config

from benchmarks.basis.storage_socket import StorageSocket
from objectcache import Client
from objectcache.channel.credentials_file import read_credentials
from objectcache_runtime.settings import Settings, load_settings
from objectcache_schemas.messages.buckets import SetPolicy
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.records import BucketPolicy, Verification

STOP_TIMEOUT_S = 60.0
DELETED_AT_ONCE = 1000  # S3's most
QUIET = ("gateway.log_level=warning", "storage.log_level=warning")


@dataclass(frozen=True, slots=True)
class Server:
    """A running server and the process whose memory counts."""

    endpoint: str
    access_key: str
    secret_key: str
    settings: Settings
    storage_pid: int

    def client(self, transport: str = "auto") -> Client:
        """A client of it."""
        return Client(
            self.endpoint,
            access_key=self.access_key,
            secret_key=self.secret_key,
            transport=transport,
        )

    def s3(self, connections_max: int = 10) -> Any:
        """A boto3 client of it."""
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name="us-east-1",
            config=Config(
                signature_version="s3v4",
                max_pool_connections=connections_max,
                s3={"addressing_style": "path"},
            ),
        )

    def verify(self, bucket: str, verification: Verification) -> None:
        """What deliveries of a bucket from here on compare with checksums."""
        policy = BucketPolicy(verification=verification)
        with closing(StorageSocket(self.settings)) as storage:
            storage.ask(SetPolicy(bucket=bucket, policy=policy), Done)

    def delete(self, bucket: str, keys: list[str]) -> None:
        """Delete chunks; their space will be written again."""
        s3 = self.s3()
        for first in range(0, len(keys), DELETED_AT_ONCE):
            objects = [{"Key": key} for key in keys[first : first + DELETED_AT_ONCE]]
            s3.delete_objects(Bucket=bucket, Delete={"Objects": objects, "Quiet": True})
        s3.close()


@contextmanager
def running_server(
    folder: Path, *assignments: str, host: str = "127.0.0.1", within: Sequence[str] = ()
) -> Generator[Server]:
    """Start it on a free port with its data in `folder` and settings `section.key=value`.

    `within` are words before the command that run it elsewhere, as the same process.
    """
    with tempfile.TemporaryDirectory(prefix="objectcache-") as run_dir:  # a socket's path is short
        given = [f"server.data_dir={folder}", f"server.run_dir={run_dir}", *QUIET, *assignments]
        flags = [word for assignment in given for word in ("--set", assignment)]
        process = subprocess.Popen(
            [
                *(*within, sys.executable, "-m", "objectcache_operations", "serve"),
                *("--listen", f"{host}:0", *flags),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            endpoint = _ready_url(process)
            storage_pid = _child_running(process.pid, "objectcache_storage_server")
            keys = read_credentials(folder / "root-credentials")
            yield Server(endpoint, *keys, load_settings(None, {}, given), storage_pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=STOP_TIMEOUT_S)


def _ready_url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.startswith("ready "):
        raise SystemExit(f"the server did not start (exit code {process.wait()})")
    return line.removeprefix("ready ").strip()


def _child_running(pid: int, module: str) -> int:
    children = psutil.Process(pid).children()
    return int(next(child.pid for child in children if module in child.cmdline()))
