"""What reads under memory pressure come to, beside what they could: pure arithmetic.

The model of a share: what memory has room for comes at the warm rate, the rest at the device's.
Both rates are those of the same round: the warm one of a process with room for everything, the
device's the mean of what it gave just before and just after. A ratio is of one round, and told as
the median of all rounds with the least and the most; the device against itself, after against
before, is the noise that a claim has to exceed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import msgspec

from benchmarks.basis.measure import Row, rates
from benchmarks.memory_pressure.pressed_reads import Opened, Round
from objectcache_schemas.limits import GIB, MIB

BUDGETED, DIRECT_ALONE, PEER = "budgeted", "the direct path alone", "buffered reads"
GOAL = 0.7  # of the model


@dataclass(frozen=True, slots=True)
class Cell:
    """One reader in one round; `warm_s` is what its bytes took with room for all of them."""

    name: str
    read: Round
    warm_s: float
    before_bytes_per_s: float  # the device's rate
    after_bytes_per_s: float

    @property
    def device_bytes_per_s(self) -> float:
        """The device's rate while this was read, as well as it is known."""
        return (self.before_bytes_per_s + self.after_bytes_per_s) / 2

    @property
    def found(self) -> float:
        """The part of the bytes that needed no device."""
        return max(0.0, 1 - self.read.device_bytes / self.read.delivered_bytes)

    def model_s(self, share: float) -> float:
        """Seconds of a round that loses only what does not fit."""
        held = min(1.0, share)
        rest_bytes = (1 - held) * self.read.delivered_bytes
        return held * self.warm_s + rest_bytes / self.device_bytes_per_s

    def of_model(self, share: float) -> float:
        """Its rate, of the model's."""
        return self.model_s(share) / self.read.seconds


@dataclass(frozen=True, slots=True)
class Share:
    """Memory for a part of the working set."""

    share: float
    payload_bytes: int
    limit_bytes: int
    opened: Mapping[str, Opened]


def pressure_rows(share: Share, cells: Sequence[Cell]) -> Iterator[Row]:
    """The rows of one share."""
    by_name = {name: [cell for cell in cells if cell.name == name] for name in share.opened}
    for name, of_name in by_name.items():
        ratios = [cell.of_model(share.share) for cell in of_name]
        goal = f"at least {GOAL}" if name == BUDGETED else ""
        yield _rate_row(share, name, of_name, ratios, model_name(share), goal)
    against = [
        ours.of_model(share.share) / peer.of_model(share.share)
        for ours, peer in zip(by_name[BUDGETED], by_name[PEER], strict=True)
    ]
    shown = f"{BUDGETED}, against {PEER}, each of its model"
    yield _rate_row(share, shown, by_name[BUDGETED], against, PEER)
    for name in (BUDGETED, PEER):
        yield _found_row(share, name, by_name[name])
    yield _device_row(share, cells)


def model_name(share: Share) -> str:
    """The model in words."""
    held = min(1.0, share.share)
    room, rest = (part * share.payload_bytes / MIB for part in (held, 1 - held))
    return f"{room:.0f} MiB at the warm rate, {rest:.0f} MiB at the device's, of the same round"


def _rate_row(
    share: Share,
    name: str,
    cells: Sequence[Cell],
    ratios: Sequence[float],
    ratio_of: str,
    goal: str = "",
) -> Row:
    model_bytes_per_s = [share.payload_bytes / cell.model_s(share.share) for cell in cells]
    return Row(
        group=_group(share),
        name=f"memory for {share.share:.0%}: {name}",
        unit="GiB/s",
        samples=rates([cell.read.seconds for cell in cells], share.payload_bytes),
        ratio=statistics.median(ratios),
        ratio_of=ratio_of,
        goal=goal,
        by_hand=f"the model: {statistics.median(model_bytes_per_s) / GIB:.2f} GiB/s",
        ratios=tuple(ratios),
        settings="storage.page_cache_bytes=0" if name == DIRECT_ALONE else "",
        details={"limit_bytes": share.limit_bytes, "cells": [_details(cell) for cell in cells]},
    )


def _found_row(share: Share, name: str, cells: Sequence[Cell]) -> Row:
    found = [cell.found for cell in cells]
    opened = share.opened[name]
    budget = f", a budget of {opened.budget_bytes / MIB:.0f} MiB" if opened.budget_bytes else ""
    held = min(1.0, share.share)
    return Row(
        group=_group(share),
        name=f"memory for {share.share:.0%}: {name}, found in memory",
        unit="%",
        samples=tuple(100 * part for part in found),
        ratio=statistics.median(found) / held,
        ratio_of="what memory has room for",
        goal="",
        by_hand=f"by {opened.budget_source}{budget}",
        ratios=tuple(part / held for part in found),
    )


def _device_row(share: Share, cells: Sequence[Cell]) -> Row:
    """The device against itself: what one read of it says about the next."""
    ratios = [cell.after_bytes_per_s / cell.before_bytes_per_s for cell in cells]
    return Row(
        group=_group(share),
        name=f"memory for {share.share:.0%}: the device, after a reader against before it",
        unit="GiB/s",
        samples=tuple(cell.before_bytes_per_s / GIB for cell in cells),
        ratio=statistics.median(ratios),
        ratio_of="the device before",
        goal="",
        by_hand="1",
        ratios=tuple(ratios),
    )


def _group(share: Share) -> str:
    return f"Memory pressure: {share.payload_bytes / MIB:.0f} MiB read again and again"


def _details(cell: Cell) -> dict[str, object]:
    return {**asdict(cell), "read": msgspec.to_builtins(cell.read)}
