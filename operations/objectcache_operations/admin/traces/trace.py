"""`objectcache admin trace`: where the last deliveries' time went."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from objectcache_operations.admin.command import PIPE_CELLS, Server, on_server, print_json
from objectcache_operations.console.failing import fail

if TYPE_CHECKING:
    from objectcache_schemas.operators.traces import DeliveryTrace

EXIT_UNKNOWN = 1  # no trace of the request is kept
LISTED = 20

RequestId = Annotated[str | None, typer.Argument(metavar="[REQUEST_ID]", show_default=False)]


@on_server
def trace(
    server: Server,
    request_id: RequestId = None,
    last: Annotated[
        int, typer.Option(min=1, max=1000, metavar="N", help="Deliveries to show, the latest.")
    ] = LISTED,
    svg_file: Annotated[
        Path | None,
        typer.Option("--svg", metavar="FILE", help="Draw the request's latest delivery there."),
    ] = None,
) -> None:
    """Show where a request's time went, layer by layer, or list the last deliveries.

    Exits 1 where no trace of the request is kept.
    """
    if svg_file is not None and request_id is None:
        fail("--svg draws one request; name its id, which the list without one shows")
    if request_id == "":
        fail("the request id is empty; leave it out to list the last deliveries")
    traces = _ask(server, request_id, last)
    if svg_file is not None:
        _draw(traces[0], svg_file)
    if server.as_json:
        print_json(traces)
    else:
        _print(traces, in_full=request_id is not None)


def _ask(server: Server, request_id: str | None, last: int) -> Sequence[DeliveryTrace]:
    from objectcache_operations.admin.api_client import path_of
    from objectcache_schemas.errors import NotFound
    from objectcache_schemas.operators.admin_api import TracesReply

    path = path_of("traces") if request_id is None else path_of("traces", request_id)
    with server.connect() as client:
        try:
            return client.get(path, TracesReply, limit=last).traces
        except NotFound as error:
            fail(error.message, EXIT_UNKNOWN)


def _draw(drawn: DeliveryTrace, svg_file: Path) -> None:
    from objectcache_operations.admin.traces.trace_svg import trace_svg

    try:
        svg_file.write_text(trace_svg(drawn), "utf-8")
    except OSError as error:
        fail(f"{svg_file} cannot be written: {error.strerror or error}")


def _print(traces: Sequence[DeliveryTrace], in_full: bool) -> None:
    from rich.console import Console

    from objectcache_operations.admin.traces.trace_view import list_view, trace_view

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPE_CELLS
    if not in_full:
        console.print(list_view(traces))
        return
    for index, shown in enumerate(traces):
        if index:
            console.print()
        console.print(trace_view(shown))
