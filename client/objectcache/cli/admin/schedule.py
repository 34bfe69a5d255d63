"""`objectcache admin schedule`: who gets which bytes when, of a running server.

Changes hold at once, for what is under way too, and are kept over a restart. Each command prints
the schedule that is then in force.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from objectcache.cli.admin.command import (
    AsJson,
    errors_end_the_command,
    print_json,
    storage_connection,
)
from objectcache.cli.settings_flags import Assignments, Config, DataDir

if TYPE_CHECKING:
    from rich.console import RenderableType

    from objectcache_schemas.schedule import ScheduleChanges, ScheduleState

PIPE_CELLS = 160  # where nobody says how wide a line may be

schedule_app = typer.Typer(help="Who gets which bytes when.", no_args_is_help=True)

Flags = tuple[str | None, str | None, list[str] | None]
Rate = Annotated[str, typer.Argument(metavar="RATE|none", show_default=False)]


@schedule_app.command()
def show(
    data_dir: DataDir = None,
    config: Config = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Show the schedule in force, the rate, and the deliveries under way."""
    from objectcache.cli.admin.schedule_view import schedule_view
    from objectcache_schemas.schedule import GetSchedule, ScheduleState

    with storage_connection(config, data_dir, assignments) as storage:
        state = storage.ask(GetSchedule(), ScheduleState)
    if as_json:
        _print_document(state)
    else:
        _print_view(schedule_view(state))


@schedule_app.command()
def set_cap(
    cap: Rate,
    data_dir: DataDir = None,
    config: Config = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Bound the rate of all deliveries together, such as 50Gbps or 6GB/s."""
    from objectcache.cli.admin.schedule_flags import rate_gbps_of
    from objectcache_schemas.schedule import ScheduleChanges

    with errors_end_the_command():
        changes = ScheduleChanges(cap_gbps=rate_gbps_of(cap))
    _change(changes, (config, data_dir, assignments), as_json)


@schedule_app.command()
def set_policy(
    name: Annotated[str, typer.Argument(metavar="POLICY", show_default=False)],
    data_dir: DataDir = None,
    config: Config = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Choose how layerwise deliveries share the link, such as stall_dynamic or equal."""
    from objectcache.cli.admin.schedule_flags import policy_of
    from objectcache_schemas.schedule import ScheduleChanges

    with errors_end_the_command():
        changes = ScheduleChanges(policy=policy_of(name))
    _change(changes, (config, data_dir, assignments), as_json)


@schedule_app.command()
def set_margin(
    margin: Rate,
    data_dir: DataDir = None,
    config: Config = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Choose what calibrated_stall_opt adds to a delivery's rate, such as 5Gbps."""
    from objectcache.cli.admin.schedule_flags import rate_gbps_of
    from objectcache_schemas.schedule import ScheduleChanges

    with errors_end_the_command():
        changes = ScheduleChanges(margin_gbps=rate_gbps_of(margin))
    _change(changes, (config, data_dir, assignments), as_json)


@schedule_app.command()
def set_epoch(
    epoch: Annotated[str, typer.Argument(metavar="TIME", show_default=False)],
    data_dir: DataDir = None,
    config: Config = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Choose the time between admissions by policies that assign rates, such as 10ms."""
    from objectcache.cli.admin.schedule_flags import epoch_s_of
    from objectcache_schemas.schedule import ScheduleChanges

    with errors_end_the_command():
        changes = ScheduleChanges(epoch_s=epoch_s_of(epoch))
    _change(changes, (config, data_dir, assignments), as_json)


@schedule_app.command()
def set_threshold(
    threshold: Annotated[str, typer.Argument(metavar="SIZE|none", show_default=False)],
    data_dir: DataDir = None,
    config: Config = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Choose the payload from which delivery: auto is layerwise, such as 512MiB."""
    from objectcache.cli.admin.schedule_flags import threshold_bytes_of
    from objectcache_schemas.schedule import ScheduleChanges

    with errors_end_the_command():
        changes = ScheduleChanges(layerwise_threshold_bytes=threshold_bytes_of(threshold))
    _change(changes, (config, data_dir, assignments), as_json)


@schedule_app.command()
def tenant(
    name: Annotated[str, typer.Argument(metavar="TENANT", show_default=False)],
    weight: Annotated[
        float | None, typer.Option(metavar="NUMBER", help="Its share beside others' 1.")
    ] = None,
    cap: Annotated[
        str | None, typer.Option(metavar="RATE|none", help="Rate of its deliveries together.")
    ] = None,
    deliveries_max: Annotated[
        str | None, typer.Option(metavar="NUMBER|none", help="Its deliveries at once; more wait.")
    ] = None,
    reset: Annotated[
        bool, typer.Option("--reset", help="As everybody else again, but for what is given.")
    ] = False,
    data_dir: DataDir = None,
    config: Config = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Change what is given of a tenant's share and leave the rest. A tenant is who asks."""
    from objectcache.cli.admin.schedule_flags import TenantFlags, changed_share, share_changes_of
    from objectcache_schemas.schedule import (
        GetSchedule,
        ScheduleChanges,
        ScheduleState,
        SetSchedule,
    )

    with errors_end_the_command():
        given = share_changes_of(TenantFlags(weight, cap, deliveries_max))
    with storage_connection(config, data_dir, assignments) as storage:
        state = storage.ask(GetSchedule(), ScheduleState)
        if given or reset:
            current = None if reset else state.configuration.tenants.get(name)
            share = changed_share(current, given) if given else None
            changes = ScheduleChanges(tenants={name: share})
            state = storage.ask(SetSchedule(changes=changes), ScheduleState)
    _print_configuration(state, as_json)
    if given and not _has_deliveries(state, name):
        from objectcache.cli.admin.printable import printable

        typer.echo(f"no delivery of tenant {printable(name)} runs; its share waits", err=True)


@schedule_app.command()
def reset(
    data_dir: DataDir = None,
    config: Config = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Forget all changes, the tenants' shares too: the settings hold again."""
    from objectcache_schemas.schedule import ScheduleChanges

    _change(ScheduleChanges(), (config, data_dir, assignments), as_json, reset=True)


def _change(changes: ScheduleChanges, flags: Flags, as_json: bool, reset: bool = False) -> None:
    from objectcache_schemas.schedule import ScheduleState, SetSchedule

    with storage_connection(*flags) as storage:
        state = storage.ask(SetSchedule(changes=changes, reset=reset), ScheduleState)
    _print_configuration(state, as_json)


def _has_deliveries(state: ScheduleState, tenant: str) -> bool:
    """Whether some of its deliveries run; also where the state shows not all that run."""
    return len(state.deliveries) < state.delivery_count or any(
        one.tenant == tenant for one in state.deliveries
    )


def _print_configuration(state: ScheduleState, as_json: bool) -> None:
    from objectcache.cli.admin.schedule_view import configuration_view

    if as_json:
        _print_document(state)
    else:
        _print_view(configuration_view(state))


def _print_document(state: ScheduleState) -> None:
    import msgspec

    print_json(msgspec.structs.asdict(state))


def _print_view(view: RenderableType) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPE_CELLS)
    console.print(view)
