"""A device whose lanes are several links: what is copied on one of them is cut and shared.

A `Line` over it copies a layer a lane. Streams wait for the last micro-task of each link.
"""

from __future__ import annotations

import contextlib
import itertools
import time

from objectcache.gpu.device import Device, Direction, Lane, Mark, Way
from objectcache.gpu.device_overlay import DeviceOverlay
from objectcache.gpu.links.linked_copies import LinkedCopies
from objectcache.gpu.links.micro_tasks import DeviceTransfer
from objectcache.gpu.pieces import Pieces
from objectcache_schemas.errors import ObjectCacheError

_OWN = 0  # number of the device among those of the copies


class LinkedDevice(DeviceOverlay):
    """The first device of `copies`, in their direction."""

    def __init__(self, under: Device, copies: LinkedCopies) -> None:
        super().__init__(under)
        self._copies = copies
        self._lanes: dict[int, _LinkedLane] = {}  # by stream; the device has none of these
        self._handles = itertools.count(-1, -1)

    def lane(self, task_bytes_max: int, pieces_max: int, beside: Lane | None = None) -> Lane:
        lane = _LinkedLane(self._copies, next(self._handles))
        self._lanes[lane.stream] = lane
        return lane

    def mark(self, stream: int) -> Mark:
        lane = self._lanes.get(stream)
        return super().mark(stream) if lane is None else lane.mark()

    def hold(self, stream: int, mark: Mark) -> None:
        """As of any device; sleeps until all of it is on links (`Mark.wait_on_way`)."""
        marks = mark.of_links() if isinstance(mark, _LinkedMark) else [mark]
        for each in marks:
            super().hold(stream, each)


class _LinkedMark(Mark):
    """Everything is done of some transfers."""

    def __init__(self, copies: LinkedCopies, transfers: tuple[DeviceTransfer, ...]) -> None:
        self._copies = copies
        self._transfers = transfers

    def wait(self) -> None:
        failures: list[Exception] = []
        for transfer in self._transfers:
            try:
                self._copies.wait(transfer)
            except ObjectCacheError as error:  # raised when nothing of the others is on its way
                failures.append(error)
        if failures:
            raise failures[0]

    def wait_on_way(self, timeout_s: float | None = None) -> bool:
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        return all(
            self._copies.wait_on_links(
                transfer, None if end_s is None else max(0.0, end_s - time.monotonic())
            )
            for transfer in self._transfers
        )

    def of_links(self) -> list[Mark]:
        return [mark for each in self._transfers for mark in self._copies.marks(each)]

    def unfinished(self) -> tuple[DeviceTransfer, ...]:
        """Failed ones stay among them."""
        return tuple(transfer for transfer in self._transfers if not transfer.is_done)


class _LinkedLane(Lane):
    def __init__(self, copies: LinkedCopies, stream: int) -> None:
        self.stream = stream
        self._copies = copies
        # Replaced as a whole: `mark` is asked for from any thread.
        self._transfers: tuple[DeviceTransfer, ...] = ()
        self._behind: tuple[Mark, ...] = ()

    def copy(self, task: Pieces, direction: Direction, way: Way) -> None:
        assert direction is self._copies.direction
        transfer = self._copies.begin(_OWN, task, due=self.due, behind=self._behind)
        self._transfers = (transfer,)
        self._behind = ()

    def follow(self, mark: Mark) -> None:
        # Of other transfers it is the lane's mark that comes behind them, and its next copy, which
        # waits until the lane is idle.
        if isinstance(mark, _LinkedMark):
            self._transfers += mark.unfinished()
        else:
            self._behind += (mark,)

    def mark(self) -> _LinkedMark:
        """When everything is done that was copied here, and what the lane follows."""
        return _LinkedMark(self._copies, self._transfers)

    def wait_idle(self) -> None:
        try:
            self.mark().wait()
        finally:
            self._transfers = ()

    def close(self) -> None:
        with contextlib.suppress(ObjectCacheError):  # it is told to whoever waits for it
            self.wait_idle()
