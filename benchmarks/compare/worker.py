"""A client in a process of its own, so that its processor time is its own and no library sees
another's threads, allocator or signals.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.compare.cells import Cell
from benchmarks.compare.clients.store_client import Prefix, StoreClient
from benchmarks.compare.ways import Way

ANSWER_TIMEOUT_S = 180.0  # the slowest store of a prefix takes half of it
STOP_TIMEOUT_S = 10.0
LOG_TAIL_CHARACTERS = 300


class WorkerFailed(Exception):
    """The client cannot go on with a prefix; the message is the reason. `is_over` says that it
    cannot take part any more at all.
    """

    def __init__(self, reason: str, is_over: bool = False) -> None:
        super().__init__(reason)
        self.is_over = is_over


@dataclass(frozen=True, slots=True)
class Fetched:
    """One fetch as its process saw it: seconds from the call, and its own processor time."""

    arrivals_s: tuple[float, ...]
    processor_s: float


class Worker:
    """The other end of a client's process. Every call raises `WorkerFailed`."""

    def __init__(self, connection: Connection, log: Path) -> None:
        self._connection = connection
        self._log = log

    def open(self) -> None:
        """Connect to the store."""
        self._ask("open")

    def store(self, cell: Cell) -> None:
        """Store the prefix of a cell and make a target."""
        self._ask("store", cell)

    def fetch(self, way: Way) -> Fetched:
        """Fetch once. Its bytes are checked, and the target cleared, by `check`."""
        fetched = self._ask("fetch", way)
        assert isinstance(fetched, Fetched)
        return fetched

    def check(self, way: Way) -> None:
        """Compare every byte of the last fetch, then overwrite the target."""
        self._ask("check", way)

    def drop(self) -> None:
        """Delete the prefix."""
        self._ask("drop")

    def close(self) -> None:
        """Disconnect from the store."""
        self._ask("close")

    def _ask(self, what: str, *arguments: object) -> object:
        try:
            self._connection.send((what, arguments))
            if not self._connection.poll(ANSWER_TIMEOUT_S):
                raise WorkerFailed(f"{what}: no answer in {ANSWER_TIMEOUT_S:g} s", is_over=True)
            is_good, answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise WorkerFailed(f"{what}: it ended: {self._tail()}", is_over=True) from error
        if not is_good:
            raise WorkerFailed(f"{what}: {answer}")
        return answer

    def _tail(self) -> str:
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        return " ".join(text[-LOG_TAIL_CHARACTERS:].split())


@contextmanager
def running_worker(client: StoreClient, log: Path) -> Generator[Worker]:
    """Start the client's process, whose output goes to a file; it ends with the block."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, client, str(log)), daemon=True)
    process.start()
    there.close()
    try:
        yield Worker(here, log)
    finally:
        here.close()
        process.join(STOP_TIMEOUT_S)
        if process.is_alive():
            process.kill()
            process.join()


def _serve(connection: Connection, client: StoreClient, log: str) -> None:
    _send_output_to(log)
    answers = _Answers(client)
    while True:
        try:
            what, arguments = connection.recv()
        except EOFError:
            break
        try:
            connection.send((True, getattr(answers, what)(*arguments)))
        except (Exception, SystemExit) as error:  # whatever a peer's library raises is its row's
            connection.send((False, f"{type(error).__name__}: {error}"[:LOG_TAIL_CHARACTERS]))
    # Destructors of some libraries wait for threads that have gone.
    os._exit(0)


def _send_output_to(log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


class _Answers:
    """What the worker is asked, by the method's name."""

    def __init__(self, client: StoreClient) -> None:
        self._client = client
        self._prefix: Prefix | None = None

    def open(self) -> None:
        self._client.open()

    def store(self, cell: Cell) -> None:
        self._prefix = Prefix.of(cell)
        self._client.store(self._prefix)

    def fetch(self, way: Way) -> Fetched:
        processor_s, begin_s = time.process_time(), time.perf_counter()
        arrivals = self._client.fetch(way)
        processor_s = time.process_time() - processor_s
        return Fetched(tuple(at_s - begin_s for at_s in arrivals), processor_s)

    def check(self, way: Way) -> None:
        prefix: Any = self._prefix
        for layer in range(prefix.num_layers):
            prefix.check(layer, self._client.layer(way, layer))
        self._client.clear()

    def drop(self) -> None:
        self._prefix = None
        self._client.drop()

    def close(self) -> None:
        self._client.close()
