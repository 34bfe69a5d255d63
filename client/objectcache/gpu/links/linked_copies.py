"""Copies over several links at once; a thread for each, which sleeps while it has nothing to do."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from objectcache.gpu.device import CopyFailed, Device, Direction, Lane, Mark, Way
from objectcache.gpu.line import LineSettings
from objectcache.gpu.links.link_pulls import LinkPulls
from objectcache.gpu.links.link_rates import LinkRates
from objectcache.gpu.links.micro_tasks import DeviceLink, DeviceTransfer, MicroTask, Pull
from objectcache.gpu.links.pull_settings import PullSettings
from objectcache.gpu.pieces import Pieces
from objectcache_schemas.errors import InvalidRequest, ObjectCacheError, Unavailable


class LinkedCopies:
    """One direction between host memory and several devices. Thread-safe.

    Device n of `devices` has link n. `relays` are the (link, device) pairs over which a link may
    reach a device that is not its own: none unless given, best those that `relay_check` passed.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        direction: Direction,
        settings: PullSettings,
        rates: LinkRates,
        *,
        relays: frozenset[tuple[int, int]] = frozenset(),
        ways: LineSettings | None = None,
    ) -> None:
        """A device's own link copies pieces by `ways`, without them by copy engines.

        Raises `Unavailable` where a device has no lanes to give.
        """
        self._devices = devices
        self.direction = direction
        self._settings = settings
        self.ways = ways or LineSettings(
            Way.BATCH if all(Way.BATCH in each.ways for each in devices) else Way.EACH
        )
        links = [
            DeviceLink(n, frozenset({n}), frozenset(to for link, to in relays if link == n))
            for n in range(len(devices))
        ]
        self._pulls = LinkPulls(links, settings, rates)
        self._changed = threading.Condition()
        self._open: dict[DeviceTransfer, _OnLinks] = {}
        # Those that were open when a link failed, and failed with it: no more than that.
        self._failures: dict[DeviceTransfer, CopyFailed] = {}
        self._closed = False
        self._threads = [_LinkThread(self, link) for link in links]
        try:
            for thread in self._threads:
                thread.begin()
        except Exception:
            self.close()
            raise

    def begin(
        self,
        device: int,
        pieces: Pieces,
        *,
        due: int = 0,
        node: int = 0,
        behind: Sequence[Mark] = (),
    ) -> DeviceTransfer:
        """Copy pieces of page-locked memory, behind `behind`. Ends with `wait` or `abort`, and the
        caller holds the memory files until then.

        Raises `InvalidRequest` where no link reaches the device, and after `close`; `DeviceFailed`
        where all links that reach it have failed.
        """
        with self._changed:
            if self._closed:
                raise InvalidRequest("the links are closed")
            transfer = self._pulls.begin(device, pieces, due=due, node=node, is_behind=bool(behind))
            self._open[transfer] = _OnLinks(tuple(behind))
            self._changed.notify_all()
            return transfer

    def wait(self, transfer: DeviceTransfer) -> None:
        """Sleep until all of it is copied. Raises `CopyFailed` where no link is left to do it, and
        `InvalidRequest` where it was aborted; its memory is out of use in any case.
        """
        with self._changed:
            self._changed.wait_for(lambda: transfer.is_quiet)
            self._open.pop(transfer, None)
            self._raise_if_ended(transfer)

    def wait_on_links(self, transfer: DeviceTransfer, timeout_s: float | None = None) -> bool:
        """Sleep until all of it is on links; False where that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_on_links(transfer), timeout_s)

    def marks(self, transfer: DeviceTransfer) -> list[Mark]:
        """Moments of links' streams at which all of it is there, for a stream to wait for.

        Sleeps until all of it is on links. What is on a link that fails from then on fails the
        transfer: others would carry it behind the back of whoever waits. Raises as `wait` does.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_on_links(transfer))
            self._raise_if_ended(transfer)
            if transfer.is_done:
                return []
            on_links = self._open[transfer]
            on_links.is_awaited = True
            return list(on_links.marks.values())

    def _is_on_links(self, transfer: DeviceTransfer) -> bool:
        return transfer.is_quiet or transfer.left == len(self._open[transfer].tasks)

    def _raise_if_ended(self, transfer: DeviceTransfer) -> None:
        if (failure := self._failures.get(transfer)) is not None:
            raise failure
        if transfer.is_aborted:
            raise InvalidRequest("the transfer was aborted")

    def abort(self, transfer: DeviceTransfer) -> None:
        """Copy no more of it, and return when nothing of it is on a link: its memory may be used
        for something else then.
        """
        with self._changed:
            self._pulls.abort(transfer)
            self._changed.notify_all()
            self._changed.wait_for(lambda: transfer.is_quiet)
            self._open.pop(transfer, None)

    def close(self) -> None:
        """Abort what is not there yet, and end the threads when nothing is on a link any more."""
        with self._changed:
            self._closed = True
            for transfer in self._open:
                if not transfer.is_quiet:
                    self._pulls.abort(transfer)
            self._changed.notify_all()
        for thread in self._threads:
            thread.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the links' threads ---

    def next_for(self, number: int, on_link: int) -> tuple[Pull, tuple[Mark, ...]] | None:
        """What the link takes. Where there is nothing it sleeps until there is, unless it has
        something to wait for; None then, and when all is closed.
        """
        with self._changed:
            while True:
                now_s = time.monotonic()
                if (pull := self._pulls.pull(number, now_s)) is not None:
                    return pull, self._open[pull.task.transfer].behind
                if on_link or self._closed:
                    return None
                again_s = self._pulls.ask_again_s(now_s)
                self._changed.wait(None if again_s is None else max(0.0, again_s - now_s))

    def on_lane(self, number: int, pull: Pull, stream: int, mark: Mark) -> None:
        """It is on the stream before the mark."""
        with self._changed:
            transfer = pull.task.transfer
            on_links = self._open[transfer]
            on_links.tasks.add(pull.task)
            on_links.marks[number, stream] = mark
            if self._is_on_links(transfer):
                self._changed.notify_all()

    def done(self, number: int, pull: Pull) -> None:
        """It is where it belongs."""
        with self._changed:
            self._open[pull.task.transfer].tasks.remove(pull.task)
            self._pulls.done(number, pull.task, time.monotonic())
            self._changed.notify_all()

    def lost(self, number: int, error: Exception, on_link: Sequence[Pull]) -> None:
        """The link has failed, with what is on it, and copies nothing any more."""
        why = error.message if isinstance(error, ObjectCacheError) else repr(error)
        failure = CopyFailed(f"the link of {self._devices[number]!r} failed: {why}")
        with self._changed:
            for pull in on_link:
                transfer = pull.task.transfer
                self._open[transfer].tasks.discard(pull.task)
                if self._open[transfer].is_awaited:
                    self._pulls.abort(transfer)
                    self._failures[transfer] = failure
            for on_links in self._open.values():
                # What the link has brought before is there.
                on_links.marks = {at: m for at, m in on_links.marks.items() if at[0] != number}
            for transfer in self._pulls.lose(number):
                self._failures[transfer] = failure
            self._changed.notify_all()

    def device(self, number: int) -> Device:
        """Of the link."""
        return self._devices[number]

    @property
    def settings(self) -> PullSettings:
        """How links share."""
        return self._settings

    def __repr__(self) -> str:
        return f"<LinkedCopies {self.direction.value}, {self._pulls!r}>"


@dataclass(slots=True)
class _OnLinks:
    """Of a transfer that has not ended."""

    behind: tuple[Mark, ...]
    tasks: set[MicroTask] = field(default_factory=set)  # on streams, and not done
    marks: dict[tuple[int, int], Mark] = field(default_factory=dict)  # by link and stream, the last
    is_awaited: bool = False  # by a stream


class _LinkThread:
    def __init__(self, copies: LinkedCopies, link: DeviceLink) -> None:
        self._copies = copies
        self._number = link.number
        self._relayed = link.relayed
        self._lanes: list[Lane] = []  # all of them
        self._direct: deque[Lane] = deque()  # those that are free
        self._relays: dict[tuple[int, int], Lane] = {}  # by device and buffer
        self._on: deque[tuple[Pull, Lane]] = deque()
        self._failure: Exception | None = None
        self._begun = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"objectcache-link-{link.number}", daemon=True
        )

    def begin(self) -> None:
        self._thread.start()
        self._begun.wait()
        if self._failure is not None:
            raise self._failure

    def end(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._make_lanes()
        except Exception as error:  # raised in the thread that makes the links
            self._failure = error
            self._close_lanes()
            return
        finally:
            self._begun.set()
        try:
            while self._step():
                pass
        except Exception as error:  # of the link: others carry what was on it
            for _, lane in self._on:
                with contextlib.suppress(Unavailable):  # then it has ended, too
                    lane.wait_idle()
            self._copies.lost(self._number, error, [pull for pull, _ in self._on])
        self._close_lanes()

    def _make_lanes(self) -> None:
        settings = self._copies.settings
        device = self._copies.device(self._number)
        device.enter_thread()
        longest_bytes = max(settings.chunk_bytes, settings.fallback_bytes)
        for _ in range(settings.depth):
            apart = not self._direct or self._copies.ways.takes_kernels
            first = None if apart else self._direct[0]
            self._direct.append(device.lane(longest_bytes, settings.pieces_max, first))
            self._lanes.append(self._direct[-1])
        for target in sorted(self._relayed):
            for buffer in range(settings.relay_buffers):
                lane = device.relay(
                    self._copies.device(target), settings.chunk_bytes, settings.pieces_max
                )
                self._relays[target, buffer] = lane
                self._lanes.append(lane)

    def _step(self) -> bool:
        """Take something, or wait for the oldest that is on the link; False when all is over."""
        if (taken := self._copies.next_for(self._number, len(self._on))) is not None:
            pull, behind = taken
            lane = self._lane(pull)
            self._on.append((pull, lane))
            for mark in behind:
                lane.follow(mark)
            pieces = pull.task.pieces
            lane.copy(pieces, self._copies.direction, self._copies.ways.way_of(pieces))
            mark = self._copies.device(self._number).mark(lane.stream)
            self._copies.on_lane(self._number, pull, lane.stream, mark)
            return True
        if not self._on:
            return False
        pull, lane = self._on[0]
        lane.wait_idle()
        self._on.popleft()
        if not pull.is_relayed:
            self._direct.append(lane)
        self._copies.done(self._number, pull)
        return True

    def _lane(self, pull: Pull) -> Lane:
        if pull.relay_buffer is None:
            return self._direct.popleft()
        lane = self._relays[pull.task.transfer.device, pull.relay_buffer]
        lane.wait_idle()  # its buffer is full until then
        return lane

    def _close_lanes(self) -> None:
        for lane in reversed(self._lanes):
            with contextlib.suppress(Unavailable):  # of a device that has failed
                lane.close()
