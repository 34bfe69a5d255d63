"""`objectcache admin servers`: the storage servers of the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from objectcache_operations.admin.command import Server, on_server, print_json, print_view

if TYPE_CHECKING:
    from objectcache_schemas.operators.admin_api import StorageServerView

servers_app = typer.Typer(help="The storage servers of the store.", no_args_is_help=True)


@servers_app.command(name="list")
@on_server
def list_(server: Server) -> None:
    """Show every storage server: its load, how far it is behind, whether it drains."""
    from objectcache_operations.admin.tables import table_of
    from objectcache_schemas.operators.admin_api import ServersReply

    with server.connect() as client:
        found = client.get("/v1/servers", ServersReply)
    if server.as_json:
        print_json(found)
        return
    rows = [server_row(one) for one in found.servers]
    columns = ("server", "state", "writer", "load", "in flight", "sessions", "lag")
    print_view(table_of(columns, rows, columns[3:]))


def server_row(one: StorageServerView) -> tuple[str, ...]:
    """What the table says of a server."""
    from objectcache_runtime.amounts import size_text

    return (
        one.server,
        _state(one),
        one.writer or "-",
        f"{one.load:,}",
        size_text(one.in_flight_bytes),
        f"{one.sessions:,}",
        _lag(one),
    )


def _state(one: StorageServerView) -> str:
    if not one.ok:
        return one.message
    told = ("draining" if one.draining else "", one.message)
    return "; ".join(filter(None, told)) or "serves"


def _lag(one: StorageServerView) -> str:
    """What it has not replayed of its store's log."""
    if not one.ok or not one.lag_is_known:
        return "unknown"
    return f"{one.lag_records:,} record{'' if one.lag_records == 1 else 's'}"
