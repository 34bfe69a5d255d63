"""Keep a storage server, its gateways and the admin server running until someone asks them to stop.

The storage server starts first and stops last, so that a gateway that serves has something to serve
from. The others load themselves beside it, touch nothing, and begin when it serves. The gateways
share listening sockets that are the supervisor's: a connection waits while the gateway that would
have taken it is being replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from objectcache_operations.supervisor.child import (
    ChildCommand,
    EndedBeforeReady,
    SupervisionFailed,
    say,
)
from objectcache_operations.supervisor.processes import (
    ADMIN_MODULE,
    GATEWAY_MODULE,
    STORAGE_MODULE,
    module_command,
)
from objectcache_operations.supervisor.restarts import GiveUp, RestartPolicy, describe_exit
from objectcache_operations.supervisor.slot import Slot
from objectcache_runtime.first_of import end, first_done
from objectcache_runtime.root_key import (
    ROOT_ACCESS_KEY_VARIABLE,
    ROOT_CREDENTIALS_FILE,
    ROOT_SECRET_KEY_VARIABLE,
)
from objectcache_runtime.settings import Settings

ROOT_VARIABLES = frozenset({ROOT_ACCESS_KEY_VARIABLE, ROOT_SECRET_KEY_VARIABLE})
MASTER_KEY_VARIABLES = frozenset({"OBJECTCACHE_MASTER_KEY"})
# Of commands and clients; no server reads them.
CLIENT_VARIABLES = frozenset({"OBJECTCACHE_SECRET_KEY", "OBJECTCACHE_ADMIN_TOKEN"})
# The key of a shared store in S3, where it is given so.
STORE_VARIABLES = frozenset(
    {
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN",
    }
)
NOT_THE_GATEWAYS = MASTER_KEY_VARIABLES | STORE_VARIABLES | CLIENT_VARIABLES
EXIT_KILLED = 1  # a second Ctrl-C: nothing was drained
# The storage server refuses what waits in it, so that gateways that drain do not wait for it.
REFUSE_WAITING = signal.SIGUSR1
STDIN_FLAGS = ("--exit-with-stdin", "--start-with-stdin")
ADMIN_DRAIN_TIMEOUT_S = 2.0  # its requests are short


@dataclass(frozen=True, slots=True)
class Commands:
    """What is supervised."""

    storage: ChildCommand
    gateways: tuple[ChildCommand, ...]
    admin: ChildCommand | None = None


def storage_child(settings: Settings, arguments: tuple[str, ...]) -> ChildCommand:
    """The storage server, started with the settings flags `arguments`."""
    return ChildCommand(
        name="storage server",
        command=module_command(STORAGE_MODULE, (*arguments, "--exit-with-stdin")),
        ready_prefix="ready storage ",
        drain_timeout_s=settings.storage.drain_timeout_s,
        withheld=ROOT_VARIABLES | CLIENT_VARIABLES,
    )


def gateway_children(
    settings: Settings, arguments: tuple[str, ...], listen_fds: Sequence[int]
) -> tuple[ChildCommand, ...]:
    """The gateways, which all serve the listening sockets `listen_fds`."""
    passed = tuple(part for fd in listen_fds for part in ("--listen-fd", str(fd)))
    count = settings.gateway.processes
    return tuple(
        ChildCommand(
            name="gateway" if count == 1 else f"gateway {number}",
            command=module_command(
                GATEWAY_MODULE,
                (*arguments, *passed, "--number", str(number), *STDIN_FLAGS),
            ),
            ready_prefix="ready gateway ",
            drain_timeout_s=settings.gateway.drain_timeout_s,
            pass_fds=tuple(listen_fds),
            withheld=NOT_THE_GATEWAYS,
            awaits_word=True,
        )
        for number in range(count)
    )


def admin_child(settings: Settings, arguments: tuple[str, ...]) -> ChildCommand:
    """The admin server."""
    return ChildCommand(
        name="admin server",
        command=module_command(ADMIN_MODULE, (*arguments, *STDIN_FLAGS)),
        ready_prefix="ready admin ",
        drain_timeout_s=ADMIN_DRAIN_TIMEOUT_S,
        withheld=NOT_THE_GATEWAYS,
        reloads=bool(settings.admin.tls_certificate),
        awaits_word=True,
    )


def announcement(
    url: str, admin_url: str | None, data_dir: Path, environment: Mapping[str, str]
) -> str:
    """What is printed once all serve: `ready URL` first, for programs; never a secret."""
    if ROOT_ACCESS_KEY_VARIABLE in environment:
        credentials = f"from the environment, {ROOT_ACCESS_KEY_VARIABLE}"
    else:
        credentials = str(data_dir / ROOT_CREDENTIALS_FILE)
    admin = "" if admin_url is None else f"\nadmin {admin_url}"
    return f"ready {url}\ncredentials {credentials}\ndata {data_dir}{admin}"


async def supervise(commands: Commands, announce: Callable[[str | None], None]) -> int:
    """Run all until SIGTERM, SIGINT or a failure; returns the supervisor's exit code.

    `announce` gets the admin server's URL once all serve. SIGHUP replaces the gateways one after
    the other and has the others reload their certificates. A child that dies while it is first
    started ends everything: a person is watching, and the cause will not go away. Later deaths are
    followed by what `restarts` decides; without the admin server the others go on.
    """
    servers = _Servers(commands, announce)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, servers.ask_to_stop)
    loop.add_signal_handler(signal.SIGINT, servers.interrupt)
    loop.add_signal_handler(signal.SIGHUP, servers.ask_to_renew)
    return await servers.run()


class _Servers:
    def __init__(self, commands: Commands, announce: Callable[[str | None], None]) -> None:
        self._storage = Slot(commands.storage)
        self._gateways = [Slot(command) for command in commands.gateways]
        self._admin = Slot(commands.admin) if commands.admin is not None else None
        self._announce = announce
        self._stop_asked = asyncio.Event()
        self._renewal_asked = asyncio.Event()
        self._killed = False

    def ask_to_stop(self) -> None:
        self._stop_asked.set()

    def ask_to_renew(self) -> None:
        self._renewal_asked.set()

    def interrupt(self) -> None:
        """Ctrl-C: the first drains, the second kills."""
        if self._stop_asked.is_set():
            say("interrupted again; killing all servers")
            self._killed = True
            for slot in (*self._before_storage(), self._storage):
                slot.kill()
        self.ask_to_stop()

    async def run(self) -> int:
        serving = asyncio.create_task(self._serve())
        stop_asked = asyncio.create_task(self._stop_asked.wait())
        await first_done(serving, stop_asked)
        outcome, _ = await end(serving, stop_asked)
        self._storage.child.signal_if_ready(REFUSE_WAITING)
        await asyncio.gather(*(slot.stop() for slot in self._before_storage()))
        await self._storage.stop()
        return EXIT_KILLED if self._killed else _exit_code(outcome)

    def _before_storage(self) -> list[Slot]:
        return [*self._gateways, *([self._admin] if self._admin is not None else [])]

    async def _serve(self) -> NoReturn:
        may_begin = asyncio.Event()
        async with asyncio.TaskGroup() as starting:
            starting.create_task(self._start_storage(may_begin))
            admin = starting.create_task(self._start_admin(may_begin))
            for slot in self._gateways:
                starting.create_task(slot.child.start(may_begin))
        self._announce(admin.result())
        keepers = [
            *(_keep_running(slot) for slot in (self._storage, *self._gateways)),
            self._keep_admin(),
            self._keep_renewing(),
        ]
        async with asyncio.TaskGroup() as keeping:
            for keeper in keepers:
                keeping.create_task(keeper)
        raise AssertionError("a keeper returns only by raising")

    async def _start_storage(self, serves: asyncio.Event) -> None:
        await self._storage.child.start()
        serves.set()

    async def _start_admin(self, may_begin: asyncio.Event) -> str | None:
        return None if self._admin is None else await self._admin.child.start(may_begin)

    async def _keep_admin(self) -> None:
        if self._admin is None:
            return
        try:
            await _keep_running(self._admin)
        except SupervisionFailed as error:
            say(f"{error}; the others go on without it")

    async def _keep_renewing(self) -> NoReturn:
        """Replace the gateways one after the other, each time this is asked for."""
        while True:
            await self._renewal_asked.wait()
            self._renewal_asked.clear()
            for slot in (self._storage, *([self._admin] if self._admin is not None else [])):
                slot.child.reload()
            try:
                for slot in self._gateways:
                    await slot.replace()
            except SupervisionFailed as error:
                say(f"{error}; the gateways that are left serve on as they are")


async def _keep_running(slot: Slot) -> NoReturn:
    """Start the slot's child again whenever it dies; raises `SupervisionFailed` when that is no
    use.
    """
    policy = RestartPolicy()
    now_s = asyncio.get_running_loop().time
    while True:
        child = slot.child
        exit_code = await child.ended()
        if slot.child is not child:
            continue  # it was replaced
        what = f"the {child.name} {describe_exit(exit_code)}"
        decision = policy.after_exit(exit_code, now_s())
        if isinstance(decision, GiveUp):
            raise SupervisionFailed(f"{what}; {decision.reason}", decision.exit_code)
        say(f"{what}; starting it again in {decision.delay_s:g} s")
        await asyncio.sleep(decision.delay_s)
        with contextlib.suppress(EndedBeforeReady):  # one more death, for the policy
            if await slot.start_again(child):
                say(f"the {child.name} serves again")


def _exit_code(outcome: BaseException | None) -> int:
    if isinstance(outcome, BaseExceptionGroup):
        return _exit_code(outcome.exceptions[0])
    if isinstance(outcome, SupervisionFailed):
        say(f"{outcome}; stopping")
        return outcome.exit_code
    if outcome is not None and not isinstance(outcome, asyncio.CancelledError):
        raise outcome
    return 0
