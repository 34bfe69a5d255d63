"""The operator's commands. Each imports what it runs, so that `objectcache --help` stays quick.

A command that could not do what was asked prints one line to standard error and exits with 2; 1 is
left to what a check has found.
"""

from __future__ import annotations

from typing import Annotated

import typer

from objectcache_operations.admin.accounts.keys import key_app
from objectcache_operations.admin.accounts.quota import quota_app
from objectcache_operations.admin.accounts.tokens import token_app
from objectcache_operations.admin.accounts.usage import usage
from objectcache_operations.admin.accounts.users import grant_app, user_app
from objectcache_operations.admin.command import Server, on_server, print_json
from objectcache_operations.admin.copying.copy_command import copy
from objectcache_operations.admin.schedule.schedule import schedule_app
from objectcache_operations.admin.status.top import top
from objectcache_operations.admin.storage.backups import backup, restore
from objectcache_operations.admin.storage.buckets import bucket_app, pin, unpin
from objectcache_operations.admin.storage.checkpoints import checkpoint
from objectcache_operations.admin.storage.servers import servers_app
from objectcache_operations.admin.storage.state import drain, health, log_level, undrain
from objectcache_operations.admin.traces.trace import trace
from objectcache_operations.console.failing import fail
from objectcache_operations.supervisor import processes

admin_app = typer.Typer(
    help="Look after a running server: on its host with --data-dir, else with --endpoint and a "
    "token or the root key.",
    no_args_is_help=True,
)
engine_app = typer.Typer(help="The engine behind the server.", no_args_is_help=True)
for name, group in (
    *(("user", user_app), ("key", key_app), ("grant", grant_app), ("quota", quota_app)),
    *(("token", token_app), ("bucket", bucket_app), ("engine", engine_app)),
    *(("schedule", schedule_app), ("servers", servers_app)),
):
    admin_app.add_typer(group, name=name)
for command in (
    *(usage, top, trace, health, drain, undrain, log_level, pin, unpin, backup, restore),
    *(checkpoint, copy),
):
    admin_app.command()(command)

PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@engine_app.command()
@on_server
def status(server: Server) -> None:
    """Show capacity, extents, residency, paths, and what goes on in the background."""
    from objectcache_schemas.operators.engine_status import EngineStatus

    with server.connect() as client:
        found = client.get("/v1/engine", EngineStatus)
    if server.as_json:
        print_json(found)
        return
    from rich.console import Console

    from objectcache_operations.admin.status.status_view import status_view

    Console(highlight=False).print(status_view(found))


@admin_app.command()
@on_server
def fsck(
    server: Server,
    repair: Annotated[
        bool, typer.Option("--repair", help="Drop what is bad; it then reads as missing.")
    ] = False,
) -> None:
    """Compare every stored byte with its checksum, while the server serves.

    Exits 0 where all is well, 1 where something was found, repaired or not, and 2 where the check
    could not be done.
    """
    from rich.console import Console

    from objectcache_operations.admin.storage.fsck import (
        EXIT_CLEAN,
        EXIT_FINDINGS,
        EXIT_INTERRUPTED,
        check,
        is_clean,
        report_lines,
    )

    with server.connect() as client:
        try:
            report = check(client, repair, Console(stderr=True))
        except KeyboardInterrupt:
            fail("the check was ended before it was through", EXIT_INTERRUPTED)
    server.show(report, lambda: report_lines(report, repair))
    raise typer.Exit(EXIT_CLEAN if is_clean(report) else EXIT_FINDINGS)


@admin_app.command(context_settings=PASSED_ON)
def serve(context: typer.Context) -> None:
    """Start the admin API alone, beside a storage server; --help shows its flags."""
    missing = processes.missing_distributions((processes.GATEWAY_EXTRA,))
    if missing:
        fail(f"this needs packages that are not installed: {', '.join(missing)}")
    processes.replace_process(f"{processes.GATEWAY_MODULE}.admin", context.args)
