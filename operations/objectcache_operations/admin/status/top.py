"""`objectcache admin top`: the deliveries under way, again and again."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from objectcache_operations.admin.command import (
    Server,
    on_server,
    print_document,
    print_flushed,
    print_view,
    view_text,
)

if TYPE_CHECKING:
    from objectcache_operations.admin.api_client import ApiClient
    from objectcache_schemas.operators.admin_api import DeliveriesReply

    Looks: TypeAlias = Iterator[tuple[DeliveriesReply, DeliveriesReply]]

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

    Into a file or a pipe, plain lines at every look. With --json, one document a look, a line each
    unless --once is given.
    """
    with server.connect() as client:
        if once:
            before = _look(client)
            time.sleep(FIRST_INTERVAL_S if before.deliveries else 0.0)
            _print_once(server, _look(client), before)
            return
        try:
            _follow(server, _looks(client, interval))
        except KeyboardInterrupt:
            raise typer.Exit(0) from None


def _look(client: ApiClient) -> DeliveriesReply:
    from objectcache_schemas.operators.admin_api import DeliveriesReply

    return client.get("/v1/deliveries", DeliveriesReply)


def _looks(client: ApiClient, interval_s: float) -> Looks:
    """Each look with the one before it, without end; the first, at once, is its own."""
    before = _look(client)
    yield before, before
    while True:
        time.sleep(interval_s)
        now = _look(client)
        yield now, before
        before = now


def _print_once(server: Server, now: DeliveriesReply, before: DeliveriesReply) -> None:
    from objectcache_operations.admin.status.top_view import top_document, top_view

    if server.as_json:
        print_document(top_document(now, before))
    else:
        print_view(top_view(now, before))


def _follow(server: Server, looks: Looks) -> None:
    if server.as_json or not sys.stdout.isatty():
        lines_of = _json_line if server.as_json else _dated_lines
        print_flushed(lines_of(now, before) for now, before in looks)
        return
    from rich.live import Live

    from objectcache_operations.admin.status.top_view import top_view

    with Live(auto_refresh=False, screen=True) as live:
        for now, before in looks:
            live.update(top_view(now, before), refresh=True)


def _json_line(now: DeliveriesReply, before: DeliveriesReply) -> str:
    import msgspec

    from objectcache_operations.admin.documents import full_document
    from objectcache_operations.admin.status.top_view import top_document

    return msgspec.json.encode(full_document(top_document(now, before))).decode()


def _dated_lines(now: DeliveriesReply, before: DeliveriesReply) -> str:
    from objectcache_operations.admin.status.top_view import top_view

    return f"{time.strftime('%H:%M:%S')} {view_text(top_view(now, before))}"
