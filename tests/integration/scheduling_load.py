"""A served store with a schedule, a prefix in it, and threads that fetch it, for tests."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, get_args

import boto3
import numpy as np
from botocore.config import Config
from typer.testing import CliRunner

from objectcache import Client, Delivery, KvLayout
from objectcache.kv_bucket import KvBucket
from objectcache_operations.console.app import app
from objectcache_schemas.limits import KIB
from objectcache_schemas.operators.schedule import (
    GetSchedule,
    ScheduleChanges,
    ScheduleState,
    SetSchedule,
)
from objectcache_schemas.operators.traces import DeliveryTrace, GetTraces, Traces
from objectcache_schemas.policy_names import PolicyName
from tests.integration.served import BOUND_S, QUIET_SETTINGS, Served, wait_until
from tests.s3_clients import presigned_path
from tests.storage_client import StorageClient

BYTES_PER_GBIT = 1e9 / 8
EVERY_POLICY: tuple[PolicyName, ...] = get_args(PolicyName)
LAYOUT = KvLayout(
    num_layers=8,
    chunk_tokens=16,
    per_layer_chunk_bytes=16 * KIB,
    dtype="float16",
    fingerprint="scheduling",
)


class ScheduledServer(Served):
    """`objectcache serve`, and its schedule over the storage server's socket."""

    def __init__(self, data_dir: Path, *settings: str) -> None:
        flags = [part for one in (*QUIET_SETTINGS, *settings) for part in ("--set", one)]
        super().__init__(data_dir, *flags)
        self.wait_ready()

    @property
    def storage_pid(self) -> int:
        """Process id of the storage server."""
        return self.children()["objectcache_storage_server"]

    def client(self, **options: Any) -> Client:
        """The SDK, as root."""
        access_key, secret_key = self.credentials
        return Client(self.endpoint, access_key=access_key, secret_key=secret_key, **options)

    def presigned_path(self, bucket: str, key: str) -> str:
        """Path and query with which anybody may get an object."""
        access_key, secret_key = self.credentials
        make_client: Any = boto3.client  # its overloads know every AWS service by its literal name
        signer = make_client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=access_key,
            aws_secret_access_key=secret_key,
            region_name="us-east-1",
            config=Config(signature_version="s3v4"),
        )
        try:
            return presigned_path(signer, "get_object", {"Bucket": bucket, "Key": key})
        finally:
            signer.close()

    def connect(self) -> StorageClient:
        """A connection to the storage server, as a gateway has it."""
        return StorageClient(self.data_dir / "run" / "storage.sock")

    def state(self) -> ScheduleState:
        """The schedule in force, and what it does."""
        with self.connect() as connection:
            return connection.ask(GetSchedule(), ScheduleState)

    def change(self, changes: ScheduleChanges, *, reset: bool = False) -> ScheduleState:
        """Change the schedule."""
        with self.connect() as connection:
            return connection.ask(SetSchedule(changes=changes, reset=reset), ScheduleState)

    def change_by_command(self, *arguments: str) -> None:
        """Change the schedule as an operator does."""
        command = ["admin", "schedule", *arguments, "--data-dir", str(self.data_dir)]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output

    def begin_anew(self) -> None:
        """Forget all changes, and wait until what a test before left has ended."""
        self.change(ScheduleChanges(), reset=True)
        wait_until(lambda: self.state().delivery_count == 0, "earlier deliveries to end")

    def trace(self, request_id: str) -> DeliveryTrace:
        """What became of a delivery."""
        with self.connect() as connection:
            (trace,) = connection.ask(GetTraces(request_id=request_id), Traces).traces
        return trace


@dataclass(frozen=True)
class Prefix:
    """Stored chunks of random bytes: uint8[chunk_count, num_layers, per_layer_chunk_bytes]."""

    bucket: KvBucket
    keys: list[str]
    chunks: Any

    def of_client(self, client: Client) -> Prefix:
        """The same prefix as another client sees it."""
        bucket = client.kv_bucket(self.bucket.name, self.bucket.layout)
        return Prefix(bucket, self.keys, self.chunks)

    def fetch(self, chunk_count: int, **options: Any) -> Delivery:
        """Begin to fetch the first chunks."""
        return self.bucket.fetch(self.keys[:chunk_count], **options)

    def check(self, delivery: Delivery) -> int:
        """Wait for all of a delivery and compare it; returns its bytes."""
        layers = delivery.layers
        expected = self.chunks[: delivery.chunk_count, layers.start : layers.stop]
        arrived = delivery.wait(BOUND_S)
        assert np.array_equal(arrived, expected.transpose(1, 0, 2)), delivery
        return int(arrived.nbytes)

    def fetch_and_check(self, chunk_count: int, **options: Any) -> int:
        """Fetch the first chunks and compare them; returns their bytes."""
        with self.fetch(chunk_count, **options) as delivery:
            return self.check(delivery)


def stored_prefix(client: Client, name: str, chunk_count: int, layout: KvLayout = LAYOUT) -> Prefix:
    """Chunks in a bucket of their own."""
    bucket = client.kv_bucket(name, layout, create=True)
    keys = bucket.chunk_keys(np.arange(chunk_count * layout.chunk_tokens))
    shape = (chunk_count, layout.num_layers, layout.per_layer_chunk_bytes)
    chunks = np.random.default_rng(chunk_count).integers(0, 256, shape, dtype=np.uint8)
    assert bucket.put(keys, chunks).stored == chunk_count
    return Prefix(bucket, keys, chunks)


class Load:
    """Threads that fetch until the block ends; the first error ends it, and is raised there."""

    def __init__(
        self, fetch: Callable[[random.Random], int], thread_count: int, seed: object
    ) -> None:
        """`fetch` makes one delivery by random choices, and returns its bytes."""
        self.done = self.done_bytes = 0
        self._fetch = fetch
        self._errors: list[BaseException] = []
        self._stopping = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(f"{seed}-{number}"),))
            for number in range(thread_count)
        ]

    def wait_done(self, count: int) -> None:
        """Wait until so many deliveries have ended, or one has failed."""
        with self._changed:
            ended = self._changed.wait_for(lambda: self.done >= count or self._errors, BOUND_S)
            assert ended, f"{self.done} of {count} deliveries have ended in {BOUND_S} s"
            assert not self._errors, self._errors[0]

    def _run(self, choices: random.Random) -> None:
        while not self._stopping:
            try:
                fetched_bytes = self._fetch(choices)
            except BaseException as error:
                with self._changed:
                    self._errors.append(error)
                    self._stopping = True
                    self._changed.notify_all()
                return
            with self._changed:
                self.done += 1
                self.done_bytes += fetched_bytes
                self._changed.notify_all()

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        for thread in self._threads:
            thread.join(BOUND_S)
        assert not any(thread.is_alive() for thread in self._threads), "a delivery hangs"
        if self._errors:
            raise self._errors[0]


class Fetching(threading.Thread):
    """One call in a thread of its own; `outcome` is what it returned or raised."""

    def __init__(self, call: Callable[..., Any], *arguments: object) -> None:
        super().__init__(daemon=True)
        self._call, self._arguments = call, arguments
        self._outcome: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """See `threading.Thread`."""
        try:
            self._outcome = self._call(*self._arguments)
        except BaseException as error:
            self._error = error

    def outcome(self) -> Any:
        """What the call returned; raises what it raised."""
        self.join(BOUND_S)
        assert not self.is_alive(), "a call hangs"
        if self._error is not None:
            raise self._error
        return self._outcome
