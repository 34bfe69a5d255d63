"""What the operator's commands share: their flags, the connection, and how they end."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from objectcache.cli.failing import fail
from objectcache.cli.settings_flags import find_settings

if TYPE_CHECKING:
    from objectcache.cli.admin.storage_socket import StorageSocket

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@contextmanager
def errors_end_the_command() -> Generator[None]:
    """An error of ours within the block becomes one line, and exit 2."""
    from objectcache_schemas.errors import ObjectCacheError

    try:
        yield
    except ObjectCacheError as error:
        fail(error.message)


@contextmanager
def storage_connection(
    config: str | None, data_dir: str | None, assignments: list[str] | None
) -> Generator[StorageSocket]:
    """A connection to the server; an error within the block ends the command."""
    from objectcache.cli.admin.storage_socket import StorageSocket

    with (
        errors_end_the_command(),
        StorageSocket(find_settings(config, data_dir, assignments)) as storage,
    ):
        yield storage


def print_json(document: Any) -> None:
    """One document, for programs."""
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
