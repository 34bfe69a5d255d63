"""The control's end of one worker: its process, its socket, which files it has mapped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping

import msgspec

from objectcache_relay.decoding.jobs import (
    ANSWERS,
    MESSAGE_BYTES_MAX,
    DecodeJob,
    FileChanged,
    JobEnded,
    MapFile,
    UnmapFile,
    WorkerReady,
)
from objectcache_schemas.errors import Unavailable
from objectcache_schemas.limits import MIB

MODULE = "objectcache_relay.decoding.worker"
ANY_CPU = -1
# Of a file that nobody has touched, whoever maps it has all pages cleared: slower than this only
# where the host stands still.
MAP_BYTES_PER_S_MIN = 256 * MIB
# A killed process that is there for longer is in a call of the system, from which it never comes
# back to its own code: it writes nothing either.
END_S = 10.0
# Libraries that numpy brings would begin threads of their own, each with memory.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

logger = logging.getLogger("objectcache.relay.decoding")


class SharedFile:
    """A memory file that workers may map: landing memory, an engine's target, or memory that is
    decoded into for one. `descriptor` is its own.
    """

    def __init__(self, number: int, descriptor: int, length_bytes: int, *, is_target: bool) -> None:
        """Raises `Unavailable`, see `duplicate`."""
        self.descriptor = duplicate(descriptor)
        self.message = MapFile(number, length_bytes, is_target)

    @property
    def number(self) -> int:
        """What jobs call it."""
        return self.message.file

    def close(self) -> None:
        """No worker maps it any more."""
        os.close(self.descriptor)

    def __repr__(self) -> str:
        return f"<SharedFile {self.number}, {self.message.length_bytes} bytes>"


def duplicate(descriptor: int) -> int:
    """The same file by another number. Raises `Unavailable` where the process may have no more."""
    try:
        return os.dup(descriptor)
    except OSError as error:
        raise Unavailable(f"the fetcher cannot pass memory to its workers: {error}") from error


class WorkerEnded(Exception):
    """The process answers nothing any more."""


class WorkerProcess:
    """One process. Used in the event loop; nothing here waits but `ended`.

    It does what it is asked in order, and answers each. What its socket has no room for waits here:
    no more than two messages of a file that it has mapped, and the jobs.
    """

    def __init__(self, cpu: int = ANY_CPU) -> None:
        """Begin it. It is killed when the thread that began it ends, so this is called in the main
        one. Raises `OSError` where there is no process to be had.
        """
        assert threading.current_thread() is threading.main_thread()
        self.cpu = cpu
        self.is_ready = False
        self.jobs: set[int] = set()  # that it is to do; whoever sends adds to them
        self._files: set[int] = set()
        self._asked: deque[float] = deque()  # seconds more than others that each may take
        self._began_s = 0.0  # when the first of these could begin
        self._unsent: deque[tuple[bytes, int | None]] = deque()  # with descriptors of its own
        self._is_writing = False
        self._loop = asyncio.get_running_loop()
        self._encoder = msgspec.msgpack.Encoder()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            ours.setblocking(False)
            self.control = ours
            arguments = [str(theirs.fileno()), str(os.getpid()), str(cpu)]
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", MODULE, *arguments],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env=_environment(os.environ),
                )
            except OSError:
                ours.close()
                raise

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def send(self, job: DecodeJob, files: tuple[SharedFile, SharedFile]) -> None:
        """Send a job, and before it what it needs of its files. Of a process that has ended,
        `answers` tells. Raises `Unavailable` where a file cannot be sent, and the job is not.
        """
        for file in files:
            if file.number not in self._files:
                descriptor = duplicate(file.descriptor)
                self._files.add(file.number)
                self._ask(file.message, descriptor, file.message.length_bytes)
        self._ask(job)

    def close_file(self, file: SharedFile) -> None:
        """Have it unmapped, where it is mapped."""
        if file.number in self._files:
            self._files.discard(file.number)
            self._ask(UnmapFile(file.number))

    def _ask(
        self, message: msgspec.Struct, descriptor: int | None = None, mapped_bytes: int = 0
    ) -> None:
        if not self._asked:
            self._began_s = time.monotonic()
        self._asked.append(mapped_bytes / MAP_BYTES_PER_S_MIN)
        self._unsent.append((self._encoder.encode(message), descriptor))
        if not self._is_writing:
            self._flush()

    def _flush(self) -> None:
        """Send what there is room for, in order; the rest when there is more."""
        while self._unsent:
            data, descriptor = self._unsent[0]
            try:
                if descriptor is None:
                    self.control.send(data)
                else:
                    socket.send_fds(self.control, [data], [descriptor])
            except BlockingIOError:
                self._write_later(True)
                return
            except OSError as error:
                logger.warning("worker %d cannot be sent anything: %s", self.pid, error)
                self._forget_unsent()
                with contextlib.suppress(OSError):  # it has ended, which the socket tells anyhow
                    self.control.shutdown(socket.SHUT_RDWR)
                break
            self._unsent.popleft()
            if descriptor is not None:
                os.close(descriptor)
        self._write_later(False)

    def _write_later(self, is_writing: bool) -> None:
        if is_writing and not self._is_writing:
            self._loop.add_writer(self.control.fileno(), self._flush)
        elif self._is_writing and not is_writing:
            self._loop.remove_writer(self.control.fileno())
        self._is_writing = is_writing

    def _forget_unsent(self) -> None:
        for _, descriptor in self._unsent:
            if descriptor is not None:
                os.close(descriptor)
        self._unsent.clear()

    def is_late(self, now_s: float, timeout_s: float) -> bool:
        """Whether what it does now has taken more than `timeout_s`, and, where it maps a file, more
        than that takes.
        """
        return bool(self._asked) and now_s - self._began_s > timeout_s + self._asked[0]

    def answers(self) -> Iterator[JobEnded]:
        """The jobs that it has done. Raises `WorkerEnded`."""
        while True:
            try:
                data = self.control.recv(MESSAGE_BYTES_MAX)
            except BlockingIOError:
                return
            except OSError as error:
                raise WorkerEnded from error
            if not data:
                raise WorkerEnded
            answer = ANSWERS.decode(data)
            if isinstance(answer, WorkerReady):
                self.is_ready = True
                continue
            self._asked.popleft()
            self._began_s = time.monotonic()
            if not isinstance(answer, FileChanged):
                self.jobs.discard(answer.number)
                yield answer

    def kill(self) -> None:
        """Nothing is sent or heard any more; `ended` is to be awaited."""
        self._process.kill()
        self._forget_unsent()
        self._write_later(False)
        self.control.close()

    async def ended(self) -> int:
        """The exit status of a process that was killed, when it writes nothing any more: `END_S` at
        most.
        """
        if (status := self._process.poll()) is not None:
            return status
        gone = asyncio.Event()
        handle = os.pidfd_open(self.pid)
        try:
            self._loop.add_reader(handle, gone.set)
            async with asyncio.timeout(END_S):
                await gone.wait()
        except TimeoutError:
            logger.error("worker %d was killed, and does not end", self.pid)
        finally:
            self._loop.remove_reader(handle)
            os.close(handle)
        status = self._process.poll()
        return -signal.SIGKILL if status is None else status

    def __repr__(self) -> str:
        return f"<WorkerProcess {self.pid}, {len(self.jobs)} jobs>"


def _environment(own: Mapping[str, str]) -> dict[str, str]:
    """Without this process' secrets: a worker reads none."""
    kept = {name: value for name, value in own.items() if not name.startswith("OBJECTCACHE_")}
    return {**kept, **ONE_THREAD}
