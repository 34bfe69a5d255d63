"""`objectcache admin schedule`: who gets which bytes when, of a running server.

Changes hold at once, for what is under way too, and are kept over a restart. Each command prints
the schedule that is then in force.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from objectcache_operations.admin.command import (
    Server,
    errors_end_the_command,
    on_server,
    print_json,
    print_view,
)

if TYPE_CHECKING:
    from objectcache_schemas.operators.schedule import ScheduleChanges, ScheduleState

SCHEDULE = "/v1/schedule"

# "-5Gbps" is an amount that is wrong, not a flag that is unknown.
AMOUNT = {"ignore_unknown_options": True}

schedule_app = typer.Typer(help="Who gets which bytes when.", no_args_is_help=True)

Rate = Annotated[str, typer.Argument(metavar="RATE|none", show_default=False)]


@schedule_app.command()
@on_server
def show(server: Server) -> None:
    """Show the schedule in force, the rate, and the deliveries under way."""
    from objectcache_operations.admin.schedule.schedule_view import schedule_view
    from objectcache_schemas.operators.schedule import ScheduleState

    with server.connect() as client:
        state = client.get(SCHEDULE, ScheduleState)
    if server.as_json:
        _print_document(state)
    else:
        print_view(schedule_view(state))


@schedule_app.command(context_settings=AMOUNT)
@on_server
def set_cap(server: Server, cap: Rate) -> None:
    """Bound the rate of all deliveries together, such as 50Gbps or 6GB/s."""
    _set(server, "cap_gbps", cap)


@schedule_app.command()
@on_server
def set_policy(
    server: Server,
    name: Annotated[str, typer.Argument(metavar="POLICY", show_default=False)],
) -> None:
    """Choose how layerwise deliveries share the link, such as stall_dynamic or equal."""
    _set(server, "policy", name)


@schedule_app.command(context_settings=AMOUNT)
@on_server
def set_margin(server: Server, margin: Rate) -> None:
    """Choose what calibrated_stall_opt adds to a delivery's rate, such as 5Gbps."""
    _set(server, "margin_gbps", margin)


@schedule_app.command(context_settings=AMOUNT)
@on_server
def set_epoch(
    server: Server,
    epoch: Annotated[str, typer.Argument(metavar="TIME", show_default=False)],
) -> None:
    """Choose the time between two divisions by policies that assign rates, such as 10ms."""
    _set(server, "epoch_s", epoch)


@schedule_app.command()
@on_server
def set_rates(
    server: Server,
    hold: Annotated[str, typer.Argument(metavar="every_epoch|for_life", show_default=False)],
) -> None:
    """Choose how long an assigned rate holds: worked out every epoch, or for a delivery's life."""
    _set(server, "rates", hold)


@schedule_app.command(context_settings=AMOUNT)
@on_server
def set_threshold(
    server: Server,
    threshold: Annotated[str, typer.Argument(metavar="SIZE|none", show_default=False)],
) -> None:
    """Choose the payload from which delivery: auto is layerwise, such as 512MiB."""
    _set(server, "layerwise_threshold_bytes", threshold)


@schedule_app.command()
@on_server
def tenant(
    server: Server,
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
) -> None:
    """Change what is given of a tenant's share and leave the rest. A tenant is who asks."""
    from objectcache_operations.admin.schedule.schedule_flags import (
        TenantFlags,
        changed_share,
        share_changes_of,
    )
    from objectcache_schemas.operators.admin_api import ScheduleChange
    from objectcache_schemas.operators.schedule import ScheduleChanges, ScheduleState

    with errors_end_the_command():
        given = share_changes_of(TenantFlags(weight, cap, deliveries_max))
    with server.connect() as client:
        state = client.get(SCHEDULE, ScheduleState)
        if given or reset:
            current = None if reset else state.configuration.tenants.get(name)
            share = changed_share(current, given) if given else None
            changes = ScheduleChange(changes=ScheduleChanges(tenants={name: share}))
            state = client.send("PATCH", SCHEDULE, changes, ScheduleState)
    _print_configuration(server, state)
    if given and not _has_deliveries(state, name):
        from objectcache_operations.admin.printable import printable

        typer.echo(f"no delivery of tenant {printable(name)} runs; its share waits", err=True)


@schedule_app.command()
@on_server
def reset(server: Server) -> None:
    """Forget all changes, the tenants' shares too: the settings hold again."""
    from objectcache_schemas.operators.schedule import ScheduleChanges

    _change(server, ScheduleChanges(), reset=True)


def _set(server: Server, field: str, written: str) -> None:
    """Change one field of the schedule to what an operator wrote."""
    from objectcache_operations.admin.schedule.schedule_flags import change_of

    with errors_end_the_command():
        changes = change_of(field, written)
    _change(server, changes)


def _change(server: Server, changes: ScheduleChanges, reset: bool = False) -> None:
    from objectcache_schemas.operators.admin_api import ScheduleChange
    from objectcache_schemas.operators.schedule import ScheduleState

    with server.connect() as client:
        change = ScheduleChange(changes=changes, reset=reset)
        state = client.send("PATCH", SCHEDULE, change, ScheduleState)
    _print_configuration(server, state)


def _has_deliveries(state: ScheduleState, tenant: str) -> bool:
    """Whether some of its deliveries run; also where the state shows not all that run."""
    return len(state.deliveries) < state.delivery_count or any(
        one.tenant == tenant for one in state.deliveries
    )


def _print_configuration(server: Server, state: ScheduleState) -> None:
    from objectcache_operations.admin.schedule.schedule_view import configuration_view

    if server.as_json:
        _print_document(state)
    else:
        print_view(configuration_view(state))


def _print_document(state: ScheduleState) -> None:
    import msgspec

    print_json(msgspec.structs.asdict(state))
