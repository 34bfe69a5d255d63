"""The flags with which a command finds the settings that the servers have."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from objectcache_runtime.settings import Settings

DataDir = Annotated[
    str | None,
    typer.Option("--data-dir", metavar="DIR", help="Where objects, index and credentials are."),
]
Config = Annotated[
    str | None, typer.Option("--config", metavar="FILE", help="TOML file of settings.")
]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Any setting; may be repeated."),
]


def find_settings(
    config: str | None, data_dir: str | None, assignments: Sequence[str] | None
) -> Settings:
    """The settings that the servers find with the same flags and environment.

    Raises `InvalidRequest`.
    """
    import argparse

    from objectcache_runtime.settings import settings_from_arguments

    given = argparse.Namespace(config=config, data_dir=data_dir, set=list(assignments or ()))
    return settings_from_arguments(given, os.environ)
