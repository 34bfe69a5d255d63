"""`objectcache admin copy`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from objectcache_operations.admin.command import errors_end_the_command, print_document
from objectcache_operations.console.failing import fail

if TYPE_CHECKING:
    from objectcache_operations.admin.copying.copy_chunks import Copied
    from objectcache_operations.admin.copying.endpoints import Side

EXIT_NOT_WHOLE = 1
EXIT_INTERRUPTED = 130  # as a shell reports SIGINT


def copy(
    buckets: Annotated[list[str], typer.Argument(metavar="BUCKET...", show_default=False)],
    source: Annotated[str, typer.Option("--from", metavar="URL", help="S3 port to copy from.")],
    target: Annotated[str, typer.Option("--to", metavar="URL", help="S3 port to copy to.")],
    credentials: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Key pair for the source, as AWS' tools write it."),
    ] = None,
    to_credentials: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Of the target; default: the source's.")
    ] = None,
    ca_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Authority of https endpoints.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be copied, and change nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Copy buckets of KV chunks to another server, while both serve; again, it goes on.

    Ordinary buckets: any S3 client. Accounts, policies and configuration: backup and restore.

    Exits 0 where the target then has all, 1 where something is missing, 2 where it failed.
    """
    from objectcache_operations.admin.copying.endpoints import open_side

    with errors_end_the_command():
        sides = (
            open_side(source, credentials, ca_file),
            open_side(target, to_credentials or credentials, ca_file),
        )
        try:
            done = [_copied(bucket, sides, is_dry=dry_run) for bucket in buckets]
        except KeyboardInterrupt:
            fail("ended before all was copied; the same command goes on", EXIT_INTERRUPTED)
        finally:
            for side in sides:
                side.client.close()
    if as_json:
        print_document({"dry_run": dry_run, "buckets": [_document(one) for one in done]})
    else:
        for one in done:
            for line in _lines(one, is_dry=dry_run):
                typer.echo(line)
    if not dry_run and not all(one.is_whole for one in done):
        raise typer.Exit(EXIT_NOT_WHOLE)


def _copied(bucket: str, sides: tuple[Side, Side], *, is_dry: bool) -> Copied:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TransferSpeedColumn,
    )

    from objectcache_operations.admin.copying.copy_chunks import BucketCopy
    from objectcache_operations.admin.copying.inventory import Amount
    from objectcache_operations.admin.printable import printable

    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task(printable(bucket), total=None)

        def show(copied: Amount, total_bytes: int) -> None:
            progress.update(task, completed=copied.size_bytes, total=total_bytes)

        return BucketCopy(bucket, *sides, show).run(is_dry=is_dry)


def _document(one: Copied) -> dict[str, object]:
    return {
        "bucket": one.bucket,
        "gone": one.gone,
        "is_whole": one.is_whole,
        **{
            name: {"count": amount.count, "size_bytes": amount.size_bytes}
            for name, amount in (
                *(("source", one.source), ("there", one.there)),
                *(("copied", one.copied), ("arrived", one.arrived)),
            )
        },
    }


def _lines(one: Copied, *, is_dry: bool) -> Iterator[str]:
    from objectcache_operations.admin.printable import printable
    from objectcache_runtime.amounts import size_text

    name, source = printable(one.bucket), one.source
    held = f"{name}: {source.count:,} chunks, {size_text(source.size_bytes)}"
    if is_dry:
        count = source.count - one.there.count
        size = size_text(source.size_bytes - one.there.size_bytes)
        yield f"{held}; would copy {count:,}, {size}"
        return
    gone = f", {one.gone:,} left the source meanwhile" if one.gone else ""
    yield f"{held}; {one.copied.count:,} copied, {one.there.count:,} were there{gone}"
    arrived = f"{one.arrived.count:,} of {source.count:,} chunks"
    if one.is_whole:
        yield f"{name}: the target has all {arrived}"
    else:
        yield f"{name}: the target has {arrived}: it evicts, or has a quota, or some expired"
