"""One supervised process: started, watched until it serves, stopped.

A child holds the read end of a pipe as its standard input and stops when that ends: a supervisor
that is killed takes its children with it. A child that `awaits_word` loads itself and begins when a
line arrives there. Each has a process group of its own, so that Ctrl-C reaches only the supervisor
and the order of stopping is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from objectcache_operations.supervisor.restarts import EXIT_WRONG_SETTINGS, describe_exit

READY_TIMEOUT_S = 120.0  # the storage server looks through what is stored before it serves
STOP_MARGIN_S = 5.0  # beyond a child's own drain bound, before it is killed


@dataclass(frozen=True, slots=True)
class ChildCommand:
    """How to start one child, how to know that it serves, and how long it may take to stop."""

    name: str  # for people: "gateway"
    command: tuple[str, ...]
    ready_prefix: str  # of the line on its standard output that says it serves
    drain_timeout_s: float
    pass_fds: tuple[int, ...] = ()  # descriptors that the process gets beside the standard ones
    withheld: frozenset[str] = frozenset()  # variables of our environment that it does not get
    reloads: bool = True  # whether SIGHUP makes it read its certificates again, and does not end it
    awaits_word: bool = False  # whether it begins only when a line is on its standard input
    ready_timeout_s: float = READY_TIMEOUT_S
    stop_margin_s: float = STOP_MARGIN_S


class SupervisionFailed(Exception):
    """The servers cannot be kept running; `exit_code` is the supervisor's own."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class EndedBeforeReady(SupervisionFailed):
    """The process ended while it was being started."""


class Child:
    """A process and the pipe that keeps it alive. One start at a time."""

    def __init__(self, command: ChildCommand) -> None:
        self.name = command.name
        self._settings = command
        self._ready = False
        self._process: asyncio.subprocess.Process | None = None
        self._lifeline: int | None = None  # write end of the child's standard input
        self._forwarding: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Process id while it runs, else None."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def start(self, may_begin: asyncio.Event | None = None) -> str:
        """Start it and wait until it serves; returns what follows the ready line's prefix.

        It begins once `may_begin` is set, without one at once; a child that `awaits_word` loads
        itself before. Raises `EndedBeforeReady`, or `SupervisionFailed` where it is not ready in
        time. Cancelled, it leaves the process running for `stop`.
        """
        if may_begin is not None and not self._settings.awaits_word:
            await may_begin.wait()
        await self._spawn()
        if self._settings.awaits_word:
            if may_begin is not None:
                await may_begin.wait()
            self._give_word()
        timeout_s = self._settings.ready_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                ready = await self._wait_ready()
        except TimeoutError:
            raise SupervisionFailed(
                f"the {self.name} was not ready within {timeout_s:g} s"
            ) from None
        self._forwarding = asyncio.create_task(self._forward())
        return ready

    async def ended(self) -> int:
        """Exit code of the process, once it has ended; negative is the signal that killed it."""
        assert self._process is not None
        exit_code = await self._process.wait()
        await self._release()
        return exit_code

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL after the drain bound; returns when the process is gone."""
        if self._process is None:
            return
        bound_s = self._settings.drain_timeout_s + self._settings.stop_margin_s
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(bound_s):
                await self.ended()
        except TimeoutError:
            say(f"the {self.name} did not stop within {bound_s:g} s; killing it")
            self.kill()
            await self.ended()

    def kill(self) -> None:
        """SIGKILL, now."""
        self._signal(signal.SIGKILL)

    def reload(self) -> None:
        """Have it read its certificates again, where it has any."""
        if self._settings.reloads:
            self.signal_if_ready(signal.SIGHUP)

    def signal_if_ready(self, number: signal.Signals) -> None:
        """Send a signal that would end a process which has not got as far as to expect it."""
        if self._ready:
            self._signal(number)

    async def _spawn(self) -> None:
        self._ready = False
        read_end, self._lifeline = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._settings.command,
                stdin=read_end,
                stdout=asyncio.subprocess.PIPE,
                process_group=0,
                pass_fds=self._settings.pass_fds,
                env=environment_without(self._settings.withheld, os.environ),
            )
        finally:
            os.close(read_end)

    def _give_word(self) -> None:
        assert self._lifeline is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which its output tells
            os.write(self._lifeline, b"\n")

    async def _wait_ready(self) -> str:
        async for line in self._lines():
            if line.startswith(self._settings.ready_prefix):
                self._ready = True
                return line.removeprefix(self._settings.ready_prefix).strip()
        exit_code = await self.ended()
        raise EndedBeforeReady(
            f"the {self.name} {describe_exit(exit_code)} before it was ready",
            EXIT_WRONG_SETTINGS if exit_code == EXIT_WRONG_SETTINGS else 1,
        )

    async def _lines(self) -> AsyncIterator[str]:
        assert self._process is not None
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            yield line.decode(errors="replace").rstrip()

    async def _forward(self) -> None:
        """Pass later output on, so that the pipe never fills up and blocks the child."""
        async for line in self._lines():
            say(f"{self.name}: {line}")

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _release(self) -> None:
        if self._forwarding is not None:
            await asyncio.wait({self._forwarding})  # neither cancels it nor raises what it raised
            self._forwarding = None
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    def __repr__(self) -> str:
        return f"<Child {self.name}, {f'pid {self.pid}' if self.pid else 'not running'}>"


def environment_without(withheld: frozenset[str], given: Mapping[str, str]) -> dict[str, str]:
    """What a child gets of an environment."""
    return {name: value for name, value in given.items() if name not in withheld}


def say(message: str) -> None:
    """One line for people, on standard error."""
    print(f"objectcache: {message}", file=sys.stderr, flush=True)
