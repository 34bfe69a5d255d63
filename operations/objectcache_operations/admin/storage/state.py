"""`objectcache admin health`, `drain`, `undrain` and `log-level`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from objectcache_operations.admin.command import Server, on_server
from objectcache_operations.console.failing import EXIT_WRONG_USE, fail

if TYPE_CHECKING:
    from collections.abc import Iterable

    from objectcache_schemas.operators.admin_api import HealthReply, ProcessState

LEVELS = ("debug", "info", "warning", "error")


@on_server
def health(server: Server) -> None:
    """Show the state of all processes. Exits 2 unless the server serves, and fails nobody."""
    from objectcache_schemas.operators.admin_api import HealthReply

    with server.connect() as client:
        found = client.get("/v1/health", HealthReply)
    server.show(found, lambda: health_lines(found))
    if found.status != "ok":
        raise typer.Exit(EXIT_WRONG_USE)


def health_lines(found: HealthReply) -> list[str]:
    """The state, a line for each thing."""
    from objectcache_runtime.amounts import size_text

    lost, failure = found.audit_lines_lost, found.flush_failure
    return [
        f"status        {found.status}",
        f"engine        {found.engine or '-'}",
        f"deliveries    {found.deliveries_in_flight:,} in flight, "
        f"{size_text(found.in_flight_bytes)}",
        f"damaged       {found.damaged_count:,} objects dropped since the start",
        *([f"read only     {failure}; see to the device, then restart"] if failure else []),
        *([f"audit log     {lost:,} lines lost: is its device full?"] if lost else []),
        *process_lines(found.processes),
    ]


def process_lines(processes: Iterable[ProcessState]) -> list[str]:
    """How each process answered."""
    return [f"{one.process:13} {_process_text(one)}" for one in processes]


def _process_text(one: ProcessState) -> str:
    if one.degraded:
        return f"degraded: {one.message}"
    return one.message or "ok"


StorageServerName = Annotated[
    str, typer.Option("--server", metavar="NAME", help="Which of several, as servers list says.")
]


@on_server
def drain(
    server: Server,
    name: StorageServerName = "",
    last: Annotated[
        bool, typer.Option("--last", help="Even where no other storage server takes work.")
    ] = False,
) -> None:
    """Take no new deliveries and puts; those in flight finish."""
    _drain(server, name, draining=True, last=last)


@on_server
def undrain(server: Server, name: StorageServerName = "") -> None:
    """Take deliveries and puts again."""
    _drain(server, name, draining=False)


def _drain(server: Server, name: str, *, draining: bool, last: bool = False) -> None:
    from objectcache_schemas.operators.admin_api import DrainChange, HealthReply

    change = DrainChange(draining=draining, server=name, last=last)
    with server.connect() as client:
        found = client.send("PUT", "/v1/drain", change, HealthReply)
    server.show(found, lambda: health_lines(found))


@on_server
def log_level(
    server: Server,
    level: Annotated[str, typer.Argument(metavar="|".join(LEVELS), show_default=False)],
    process: Annotated[
        str, typer.Option(metavar="NAME", help="all, admin, storage, or gateway-N.")
    ] = "all",
) -> None:
    """Change what processes log, until they end. Exits 2 where one could not be told."""
    import msgspec

    from objectcache_schemas.operators.admin_api import LogLevel, ProcessesReply

    try:
        change = msgspec.convert({"level": level, "process": process}, LogLevel)
    except msgspec.ValidationError:
        fail(f"give a level of {', '.join(LEVELS)}, of all, admin, storage or gateway-N")
    with server.connect() as client:
        found = client.send("PUT", "/v1/log-level", change, ProcessesReply)
    server.show(found, lambda: process_lines(found.processes))
    if not all(one.ok for one in found.processes):
        raise typer.Exit(EXIT_WRONG_USE)
