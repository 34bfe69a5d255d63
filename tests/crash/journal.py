"""What a process did before it was killed: a line when an operation begins, another when it ends.

A line is one write to a file opened for appending, so lines are whole and in the order in which
things happened, whichever thread wrote them. Only the last one may be torn: a kill ends a write
between two pages of the file. What it was to say never happened.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from tests.crash.workload import Operation


class Began(msgspec.Struct, frozen=True, tag=True):
    """An operation may have an effect from now on."""

    number: int
    operation: Operation


class Ended(msgspec.Struct, frozen=True, tag=True):
    """An operation is acknowledged; with an error's code it has refused."""

    number: int
    error_code: str


class Trouble(msgspec.Struct, frozen=True, tag=True):
    """Something that no engine may do."""

    text: str


class Upkept(msgspec.Struct, frozen=True, tag=True):
    """What the engine has done by itself so far in this process."""

    compacted_objects: int
    reencoded_objects: int
    evicted_objects: int
    paths: list[str]  # that hold extents


Line = Began | Ended | Trouble | Upkept


class Journal:
    """The writing end."""

    def __init__(self, file: Path) -> None:
        self._descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, line: Line) -> None:
        """Append a line; any thread may."""
        os.write(self._descriptor, msgspec.json.encode(line) + b"\n")

    def close(self) -> None:
        """Write no more."""
        os.close(self._descriptor)


@dataclass(frozen=True, slots=True)
class Ran:
    """An operation that had an effect, or may have had one: `is_acknowledged` tells which.

    It happened at one moment between `began` and `ended`, which are ticks of the store's life.
    """

    operation: Operation
    began: int
    ended: int
    is_acknowledged: bool


class Life(NamedTuple):
    """What a process did before it was killed."""

    ran: list[Ran]
    troubles: list[str]
    upkept: Upkept


def read_journal(file: Path, first_tick: int) -> Life:
    """What a journal tells. Ticks begin at `first_tick`."""
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    if lines and not lines[-1].endswith(b"\n"):
        del lines[-1]
    decode = msgspec.json.Decoder(Line).decode
    began: dict[int, tuple[Operation, int]] = {}
    ran: list[Ran] = []
    troubles: list[str] = []
    last_upkept = Upkept(0, 0, 0, [])
    for tick, line in enumerate(lines, first_tick):
        match decode(line):
            case Began(number, operation):
                began[number] = operation, tick
            case Ended(number, error_code):
                operation, began_at = began.pop(number)
                if not error_code:
                    ran.append(Ran(operation, began_at, tick, is_acknowledged=True))
            case Trouble(text):
                troubles.append(text)
            case Upkept() as upkept:
                last_upkept = upkept
    end = first_tick + len(lines)
    ran += [Ran(operation, at, end, is_acknowledged=False) for operation, at in began.values()]
    return Life(ran, troubles, last_upkept)
