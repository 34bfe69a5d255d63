"""Keep one storage server and one gateway running until someone asks them to stop.

The storage server starts first and stops last, so that a gateway that serves has something to serve
from.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

from objectcache.cli.child import Child, ChildCommand, EndedBeforeReady, SupervisionFailed, say
from objectcache.cli.processes import GATEWAY_MODULE, STORAGE_MODULE, module_command
from objectcache.cli.restarts import GiveUp, RestartPolicy, describe_exit
from objectcache_schemas.settings import Settings

ROOT_ACCESS_KEY_VARIABLE = "OBJECTCACHE_ROOT_ACCESS_KEY"
ROOT_CREDENTIALS_FILE = "root-credentials"  # written by the gateway, readable by its user only
EXIT_KILLED = 1  # a second Ctrl-C: nothing was drained


def storage_child(settings: Settings, arguments: tuple[str, ...]) -> ChildCommand:
    """The storage server, started with the settings flags `arguments`."""
    return ChildCommand(
        name="storage server",
        command=module_command(STORAGE_MODULE, (*arguments, "--exit-with-stdin")),
        ready_prefix="ready storage ",
        drain_timeout_s=settings.storage.drain_timeout_s,
    )


def gateway_child(settings: Settings, arguments: tuple[str, ...]) -> ChildCommand:
    """The gateway. A later start listens on the port that the first one got."""

    def command(*more: str) -> tuple[str, ...]:
        return module_command(GATEWAY_MODULE, (*arguments, *more, "--exit-with-stdin"))

    def command_after(url: str) -> tuple[str, ...]:
        return command("--set", f"gateway.listen={same_port(settings.gateway.listen, url)}")

    return ChildCommand(
        name="gateway",
        command=command(),
        ready_prefix="ready gateway ",
        drain_timeout_s=settings.gateway.drain_timeout_s,
        command_after=command_after,
    )


def same_port(listen: str, url: str) -> str:
    """`listen` with the port of `url`, which differs where `listen` asked for any free one."""
    return f"{listen.rpartition(':')[0]}:{url.rpartition(':')[2].rstrip('/')}"


def announcement(url: str, data_dir: Path, environment: Mapping[str, str]) -> str:
    """What is printed once both serve: `ready URL` first, for programs; never a secret."""
    if ROOT_ACCESS_KEY_VARIABLE in environment:
        credentials = f"from the environment, {ROOT_ACCESS_KEY_VARIABLE}"
    else:
        credentials = str(data_dir / ROOT_CREDENTIALS_FILE)
    return f"ready {url}\ncredentials {credentials}\ndata {data_dir}"


async def supervise(
    storage: ChildCommand, gateway: ChildCommand, announce: Callable[[str], None]
) -> int:
    """Run both until SIGTERM, SIGINT or a failure; returns the supervisor's exit code.

    `announce` gets the gateway's URL once both serve. A child that dies while it is first started
    ends everything: a person is watching, and the cause will not go away. Later deaths are followed
    by what `restarts` decides.
    """
    pair = _Pair(Child(storage), Child(gateway), announce)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, pair.ask_to_stop)
    loop.add_signal_handler(signal.SIGINT, pair.interrupt)
    return await pair.run()


class _Pair:
    def __init__(self, storage: Child, gateway: Child, announce: Callable[[str], None]) -> None:
        self._storage = storage
        self._gateway = gateway
        self._announce = announce
        self._stop_asked = asyncio.Event()
        self._killed = False

    def ask_to_stop(self) -> None:
        self._stop_asked.set()

    def interrupt(self) -> None:
        """Ctrl-C: the first drains, the second kills."""
        if self._stop_asked.is_set():
            say("interrupted again; killing both servers")
            self._killed = True
            self._gateway.kill()
            self._storage.kill()
        self.ask_to_stop()

    async def run(self) -> int:
        serving = asyncio.create_task(self._serve())
        stop_asked = asyncio.create_task(self._stop_asked.wait())
        await asyncio.wait({serving, stop_asked}, return_when=asyncio.FIRST_COMPLETED)
        stop_asked.cancel()
        serving.cancel()
        outcome = await asyncio.gather(serving, return_exceptions=True)
        await self._gateway.stop()
        await self._storage.stop()
        return EXIT_KILLED if self._killed else _exit_code(outcome[0])

    async def _serve(self) -> NoReturn:
        await self._storage.start()
        self._announce(await self._gateway.start())
        keepers = [
            asyncio.create_task(_keep_running(child)) for child in (self._storage, self._gateway)
        ]
        try:
            await asyncio.gather(*keepers)
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
        raise AssertionError("a keeper returns only by raising")


async def _keep_running(child: Child) -> NoReturn:
    """Start `child` again whenever it dies; raises `SupervisionFailed` when that is no use."""
    policy = RestartPolicy()
    now_s = asyncio.get_running_loop().time
    while True:
        exit_code = await child.ended()
        what = f"the {child.name} {describe_exit(exit_code)}"
        decision = policy.after_exit(exit_code, now_s())
        if isinstance(decision, GiveUp):
            raise SupervisionFailed(f"{what}; {decision.reason}", decision.exit_code)
        say(f"{what}; starting it again in {decision.delay_s:g} s")
        await asyncio.sleep(decision.delay_s)
        with contextlib.suppress(EndedBeforeReady):  # one more death, for the policy
            await child.start()
            say(f"the {child.name} serves again")


def _exit_code(outcome: BaseException | None) -> int:
    if isinstance(outcome, SupervisionFailed):
        say(f"{outcome}; stopping")
        return outcome.exit_code
    if outcome is not None and not isinstance(outcome, asyncio.CancelledError):
        raise outcome
    return 0
