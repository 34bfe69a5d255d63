"""What a client knows of the ways that its deliveries may take: pure, time is an argument.

A relay reports its queue now and then; what this client has assigned since counts on top, what has
come over it since does not count, and a queue is never less than what this client itself waits for.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

from objectcache.pause import Pause
from objectcache.routes.received_rate import ReceivedRate
from objectcache_schemas.operators.relay_report import RelayReport

REPORT_AGE_S_MAX = 1.0
FAILURES_MAX, FAILURES_S = 3, 10.0  # so many within so long, and a relay is left alone
MEASURED_S = 10.0  # how long a measured rate counts
MEASURED_MAX = 5
BELIEVED_SHARE = 0.5  # of the reported rate; below, what was measured counts


@dataclass(frozen=True, slots=True)
class RouteLoad:
    """How busy a way is. `rate_bytes_per_s` is None where nothing is known of it; `room_bytes` is
    landing memory that is free.
    """

    queue_bytes: float
    rate_bytes_per_s: float | None
    room_bytes: float


class WayAccount:
    """Bytes that this client waits for by one way."""

    def __init__(self) -> None:
        self.awaited_bytes = 0

    def assigned(self, length_bytes: int, now_s: float) -> None:
        """A delivery is asked for by this way."""
        self.awaited_bytes += length_bytes

    def arrived(self, length_bytes: int, now_s: float) -> None:
        """So much of what was assigned is there."""
        self.awaited_bytes -= length_bytes

    def dropped(self, length_bytes: int, now_s: float) -> None:
        """So much of it will not come by this way."""
        self.awaited_bytes -= length_bytes


class DirectAccount(WayAccount):
    """The way over this node's own storage NIC, as far as this client uses it."""

    def __init__(self, now_s: float) -> None:
        super().__init__()
        self._rate = ReceivedRate(now_s)

    def assigned(self, length_bytes: int, now_s: float) -> None:
        super().assigned(length_bytes, now_s)
        self._note(0, now_s)

    def arrived(self, length_bytes: int, now_s: float) -> None:
        super().arrived(length_bytes, now_s)
        self._note(length_bytes, now_s)

    def dropped(self, length_bytes: int, now_s: float) -> None:
        super().dropped(length_bytes, now_s)
        self._note(0, now_s)

    def _note(self, length_bytes: int, now_s: float) -> None:
        self._rate.note(now_s, length_bytes, awaits=self.awaited_bytes > 0)

    def load(self, now_s: float, others_bytes: int = 0) -> RouteLoad:
        """`others_bytes` are known to be read over the same NIC for others."""
        queue_bytes = self.awaited_bytes + others_bytes
        rate = self._rate.rate_bytes_per_s(now_s)
        return RouteLoad(queue_bytes, rate or None, float("inf"))


class RelayAccount(WayAccount):
    """One relay: its last report, and what became of this client's deliveries over it."""

    def __init__(self) -> None:
        super().__init__()
        self._report: RelayReport | None = None
        self._reported_s = float("-inf")
        self.moved_s = float("-inf")  # when it is known to have moved bytes, whoever's
        self._since: deque[tuple[float, int]] = deque()  # assigned after the report was asked for
        self._gone: deque[tuple[float, int]] = deque()  # awaited no more, for as long as it counts
        self._measured: deque[tuple[float, float]] = deque(maxlen=MEASURED_MAX)
        self._failures_s: deque[float] = deque(maxlen=FAILURES_MAX)
        self._pause = Pause()
        self._unheard = Pause()  # since its reports cannot be read
        self.is_doubted = False  # it gave none when it was asked last, nor shortly before
        self._is_on_trial = False  # it was left alone, and nothing has gone well since

    def assigned(self, length_bytes: int, now_s: float) -> None:
        super().assigned(length_bytes, now_s)
        self._since.append((now_s, length_bytes))

    def arrived(self, length_bytes: int, now_s: float) -> None:
        super().arrived(length_bytes, now_s)
        self._note_gone(length_bytes, now_s)
        if length_bytes:
            self.moved_s = max(self.moved_s, now_s)

    def dropped(self, length_bytes: int, now_s: float) -> None:
        super().dropped(length_bytes, now_s)
        self._note_gone(length_bytes, now_s)

    def _note_gone(self, length_bytes: int, now_s: float) -> None:
        while self._gone and now_s - self._gone[0][0] > REPORT_AGE_S_MAX:
            self._gone.popleft()
        self._gone.append((now_s, length_bytes))

    def reported(self, report: RelayReport, asked_s: float) -> None:
        """What the relay said when it was asked, at that time."""
        self._unheard = Pause()
        self.is_doubted = False
        before = self._report
        if before is not None and (
            report.moved_bytes > before.moved_bytes
            or report.read_queue_bytes < before.read_queue_bytes
        ):
            self.moved_s = max(self.moved_s, asked_s)
        self._report, self._reported_s = report, asked_s
        while self._since and self._since[0][0] < asked_s:
            self._since.popleft()

    def untold(self, now_s: float) -> bool:
        """It was asked for a report, and gave none: whether it is not to be asked for a while,
        which is so where the last one that it gave does not count any more either.
        """
        if self._fresh(now_s) is None:
            self.is_doubted = True
            self._unheard.failed("report", now_s)
        return self.is_unheard(now_s)

    def is_unheard(self, now_s: float) -> bool:
        """Whether it gave no report lately, and is not to be asked for one yet."""
        return self._unheard.rest_s(now_s) > 0

    def took(self, queue_bytes: float, length_bytes: int, elapsed_s: float, now_s: float) -> None:
        """A delivery behind so long a queue was there after this time."""
        if elapsed_s > 0:
            self._measured.append((now_s, (queue_bytes + length_bytes) / elapsed_s))

    def failed(self, now_s: float) -> bool:
        """It failed, or refused for another reason than that it is busy; whether it is left alone
        from now on.
        """
        self._failures_s.append(now_s)
        many = len(self._failures_s) == FAILURES_MAX and now_s - self._failures_s[0] <= FAILURES_S
        return (many or self._is_on_trial) and self._leave_alone(now_s)

    def silent(self, now_s: float) -> bool:
        """It was waited for in vain. That is enough, since three times may take longer than
        FAILURES_S; whether it is left alone from now on.
        """
        return self._leave_alone(now_s)

    def _leave_alone(self, now_s: float) -> bool:
        was_resting = self.rest_s(now_s) > 0
        self._is_on_trial = True
        self._pause.failed("get", now_s)
        return not was_resting

    def went_well(self) -> None:
        """A delivery has come over it whole."""
        self._failures_s.clear()
        self._is_on_trial = False
        self._pause.answered("get")

    def rest_s(self, now_s: float) -> float:
        """How much longer it is left alone; 0 where it may be asked."""
        return self._pause.rest_s(now_s)

    def may_be_tried(self, now_s: float) -> bool:
        """Whether nothing that is known speaks against asking it."""
        report = self._fresh(now_s)
        return self.rest_s(now_s) == 0 and (report is None or not report.is_draining)

    def read_queue_bytes(self, now_s: float) -> int:
        """As it was reported last; 0 where that is too long ago."""
        report = self._fresh(now_s)
        return 0 if report is None else report.read_queue_bytes

    def load(self, now_s: float) -> RouteLoad | None:
        """None where it cannot be chosen: its report is too old, it drains, or is left alone."""
        report = self._fresh(now_s)
        if report is None or report.is_draining or self.rest_s(now_s) > 0:
            return None
        since_bytes = sum(length for _, length in self._since)
        gone_bytes = sum(length for at_s, length in self._gone if at_s >= self._reported_s)
        return RouteLoad(
            max(report.read_queue_bytes + since_bytes - gone_bytes, self.awaited_bytes),
            self.rate_bytes_per_s(now_s),
            report.landing_free_bytes - since_bytes,
        )

    def rate_bytes_per_s(self, now_s: float) -> float | None:
        """As reported, unless less than half of that was measured; None: nothing is known."""
        report = self._fresh(now_s)
        reported = report.rate_bytes_per_s if report is not None else 0.0
        recent = [rate for at_s, rate in self._measured if now_s - at_s <= MEASURED_S]
        measured = statistics.median(recent) if recent else None
        if measured is None:
            return reported or None
        return measured if not reported or measured < BELIEVED_SHARE * reported else reported

    def _fresh(self, now_s: float) -> RelayReport | None:
        return self._report if now_s - self._reported_s <= REPORT_AGE_S_MAX else None
