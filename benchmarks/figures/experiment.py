"""What an experiment is, what it is given, and how its rows are written."""

from __future__ import annotations

import csv
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from benchmarks.basis.bench import Bench

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RowT = TypeVar("RowT")  # a frozen dataclass of text, numbers and None


@dataclass(frozen=True, slots=True)
class Context:
    """Where an experiment works, and how much it measures.

    Bytes and rates are those of the paper over `scale`; times are the paper's.
    """

    bench: Bench
    scale: int
    is_quick: bool
    say: Callable[[str], None]  # what is being measured


class Experiment(ABC, Generic[RowT]):
    """One figure of the paper. `name` is what `--only` takes, and the name of its files."""

    name: ClassVar[str]
    title: ClassVar[str]
    conditions: ClassVar[str]  # what is scaled, and what carried the bytes

    @abstractmethod
    def run(self, context: Context) -> list[RowT]:
        """Measure. Raises `NotPossible` where this machine lacks something."""

    @abstractmethod
    def plot(self, rows: Sequence[RowT]) -> Figure:
        """Draw the rows, with `plots`."""

    def notes(self, rows: Sequence[RowT]) -> list[str]:
        """Lines to print below the table: what was to be reached, and what was."""
        return []


class NotPossible(Exception):
    """The experiment cannot run on this machine; the message says why."""


def columns(rows: Sequence[object]) -> list[str]:
    """The names of a row's fields."""
    return [field.name for field in dataclasses.fields(_dataclass(rows[0]))]


def cells(row: object) -> list[Any]:
    """The values of a row's fields."""
    return [getattr(row, field.name) for field in dataclasses.fields(_dataclass(row))]


def write_csv(file: Path, rows: Sequence[object]) -> None:
    """Write rows of one kind; floats with six digits, None as nothing."""
    with file.open("w", newline="") as opened:
        writer = csv.writer(opened, lineterminator="\n")
        writer.writerow(columns(rows))
        writer.writerows([written(cell) for cell in cells(row)] for row in rows)


def written(cell: object) -> str:
    """A value as text."""
    if cell is None:
        return ""
    return f"{cell:.6g}" if isinstance(cell, float) else str(cell)


def _dataclass(row: object) -> Any:
    assert dataclasses.is_dataclass(row)
    return row
