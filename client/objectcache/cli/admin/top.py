"""`objectcache admin top`: the deliveries under way, again and again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from objectcache.cli.admin.command import Server, on_server, print_document, print_view

if TYPE_CHECKING:
    from objectcache.cli.admin.api_client import ApiClient
    from objectcache_schemas.admin_api import DeliveriesReply

FIRST_INTERVAL_S = 0.5  # between the two looks of --once, from which its rates come


@on_server
def top(
    server: Server,
    once: Annotated[bool, typer.Option("--once", help="Print once and end.")] = False,
    interval: Annotated[
        float, typer.Option(min=0.2, max=60.0, metavar="SECONDS", help="Between two looks.")
    ] = 1.0,
) -> None:
    """Show the deliveries in flight with their rates, live. Ctrl-C ends it.

    With --json, one document a look, a line each unless --once is given.
    """
    with server.connect() as client:
        before = _look(client)
        if once:
            time.sleep(FIRST_INTERVAL_S if before.deliveries else 0.0)
            _print_once(server, _look(client), before)
            return
        try:
            _follow(server, client, before, interval)
        except KeyboardInterrupt:
            raise typer.Exit(0) from None


def _look(client: ApiClient) -> DeliveriesReply:
    from objectcache_schemas.admin_api import DeliveriesReply

    return client.get("/v1/deliveries", DeliveriesReply)


def _print_once(server: Server, now: DeliveriesReply, before: DeliveriesReply) -> None:
    from objectcache.cli.admin.top_view import top_document, top_view

    if server.as_json:
        print_document(top_document(now, before))
    else:
        print_view(top_view(now, before))


def _follow(server: Server, client: ApiClient, before: DeliveriesReply, interval_s: float) -> None:
    from rich.live import Live

    from objectcache.cli.admin.top_view import top_view

    if server.as_json:
        _follow_as_json(client, before, interval_s)
    with Live(auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(interval_s)
            now = _look(client)
            live.update(top_view(now, before), refresh=True)
            before = now


def _follow_as_json(client: ApiClient, before: DeliveriesReply, interval_s: float) -> NoReturn:
    import msgspec

    from objectcache.cli.admin.documents import full_document
    from objectcache.cli.admin.top_view import top_document

    while True:
        time.sleep(interval_s)
        now = _look(client)
        line = msgspec.json.encode(full_document(top_document(now, before)))
        typer.echo(line.decode())
        before = now
