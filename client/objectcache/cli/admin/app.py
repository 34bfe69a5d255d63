"""The operator's commands. Each imports what it runs, so that `objectcache --help` stays quick.

A command that could not do what was asked prints one line to standard error and exits with 2; 1 is
left to what a check has found.
"""

from __future__ import annotations

from typing import Annotated

import typer

from objectcache.cli.admin.command import (
    AsJson,
    errors_end_the_command,
    print_json,
    storage_connection,
)
from objectcache.cli.admin.schedule import schedule_app
from objectcache.cli.admin.trace import trace
from objectcache.cli.failing import fail
from objectcache.cli.settings_flags import Assignments, Config, DataDir

admin_app = typer.Typer(
    help="Look after a running storage server, as the user that runs it.", no_args_is_help=True
)
engine_app = typer.Typer(help="The engine behind the server.", no_args_is_help=True)
bucket_app = typer.Typer(help="What an operator chooses for a bucket.", no_args_is_help=True)
admin_app.add_typer(engine_app, name="engine")
admin_app.add_typer(bucket_app, name="bucket")
admin_app.add_typer(schedule_app, name="schedule")
admin_app.command()(trace)

BucketName = Annotated[str, typer.Argument(metavar="BUCKET", show_default=False)]
Keys = Annotated[list[str], typer.Argument(metavar="KEY...", show_default=False)]


@engine_app.command()
def status(
    data_dir: DataDir = None,
    config: Config = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Show capacity, extents, residency, paths, and what goes on in the background."""
    from objectcache_schemas.engine_status import EngineState, GetEngineStatus

    with storage_connection(config, data_dir, assignments) as storage:
        found = storage.ask(GetEngineStatus(), EngineState).status
    if as_json:
        print_json(found)
        return
    from rich.console import Console

    from objectcache.cli.admin.status_view import status_view

    Console(highlight=False).print(status_view(found))


@admin_app.command()
def fsck(
    repair: Annotated[
        bool, typer.Option("--repair", help="Drop what is bad; it then reads as missing.")
    ] = False,
    data_dir: DataDir = None,
    config: Config = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Compare every stored byte with its checksum, while the server serves.

    Exits 0 where all is well, 1 where something was found, repaired or not, and 2 where the check
    could not be done.
    """
    from rich.console import Console

    from objectcache.cli.admin.fsck import (
        EXIT_CLEAN,
        EXIT_FINDINGS,
        EXIT_INTERRUPTED,
        check,
        is_clean,
        report_lines,
    )

    with storage_connection(config, data_dir, assignments) as storage:
        try:
            report = check(storage, repair, Console(stderr=True))
        except KeyboardInterrupt:
            fail("the check was ended before it was through", EXIT_INTERRUPTED)
    if as_json:
        print_json(report)
    else:
        typer.echo("\n".join(report_lines(report, repair)))
    raise typer.Exit(EXIT_CLEAN if is_clean(report) else EXIT_FINDINGS)


@bucket_app.command()
def policy(
    name: BucketName,
    durability: Annotated[
        str | None, typer.Option(metavar="sync|async", help="When a put is acknowledged.")
    ] = None,
    verification: Annotated[
        str | None, typer.Option(metavar="full|sampled|off", help="Which reads are checked.")
    ] = None,
    quota: Annotated[
        str | None, typer.Option(metavar="SIZE|none", help="Most stored bytes, such as 10GiB.")
    ] = None,
    ttl: Annotated[
        str | None, typer.Option(metavar="TIME|none", help="Life of an object, such as 7d.")
    ] = None,
    data_dir: DataDir = None,
    config: Config = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Show a bucket's policy, or change what is given and leave the rest."""
    import msgspec

    from objectcache.cli.admin.policies import (
        PolicyFlags,
        changes_of,
        policy_document,
        policy_lines,
    )
    from objectcache_schemas.messages import Bucket, Done, GetBucket, SetPolicy

    with errors_end_the_command():
        changes = changes_of(PolicyFlags(durability, verification, quota, ttl))
    with storage_connection(config, data_dir, assignments) as storage:
        found = storage.ask(GetBucket(name=name), Bucket).info.policy
        if changes:
            found = msgspec.structs.replace(found, **changes)
            storage.ask(SetPolicy(bucket=name, policy=found), Done)
    if as_json:
        print_json(policy_document(name, found))
    else:
        typer.echo("\n".join(policy_lines(name, found)))


@admin_app.command()
def pin(
    bucket: BucketName,
    keys: Keys,
    data_dir: DataDir = None,
    config: Config = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Keep objects from eviction and expiry. Keys that are not stored do not count."""
    _pin(bucket, keys, True, (config, data_dir, assignments), as_json)


@admin_app.command()
def unpin(
    bucket: BucketName,
    keys: Keys,
    data_dir: DataDir = None,
    config: Config = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Let objects be evicted and expire again."""
    _pin(bucket, keys, False, (config, data_dir, assignments), as_json)


def _pin(
    bucket: str,
    keys: list[str],
    pinned: bool,
    flags: tuple[str | None, str | None, list[str] | None],
    as_json: bool,
) -> None:
    from objectcache_schemas.messages import ObjectsPinned, PinObjects

    request = PinObjects(bucket=bucket, keys=tuple(keys), pinned=pinned)
    with storage_connection(*flags) as storage:
        count = storage.ask(request, ObjectsPinned).count
    if as_json:
        print_json({"bucket": bucket, "pinned": pinned, "asked": len(keys), "count": count})
        return
    missing = len(keys) - count
    rest = f"; {missing} not stored" if missing else ""
    typer.echo(f"{count} of {len(keys)} {'pinned' if pinned else 'unpinned'}{rest}")
