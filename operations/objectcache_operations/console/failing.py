"""How a command ends that could not do what was asked."""

from __future__ import annotations

from typing import NoReturn

import typer

EXIT_WRONG_USE = 2


def fail(message: str, exit_code: int = EXIT_WRONG_USE) -> NoReturn:
    """One line on standard error, and exit."""
    typer.echo(f"objectcache: {message}", err=True)
    raise typer.Exit(exit_code)
