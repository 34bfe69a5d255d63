"""Programs that need packages which the benchmarks' own environment does not have."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def or_say_what_to_install(remedy: str) -> Generator[None]:
    """Imports in the body; where a package is missing the program ends and says the remedy."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise SystemExit(f"{error.name} is not installed: {remedy}") from None
