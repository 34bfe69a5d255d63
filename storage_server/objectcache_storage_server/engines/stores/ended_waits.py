"""Waits of a store without a bell, which its owner can end."""

from __future__ import annotations

import threading


class EndedWaits:
    """Each wait lasts its time, or until `end_all`; after `close` none does."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._round = 0
        self.is_closed = False

    @property
    def round(self) -> int:
        """Grows with every `end_all`: for whoever waits more than once for one thing."""
        with self._changed:
            return self._round

    def wait(self, begun_in: int, timeout_s: float) -> bool:
        """Whether it was ended, where it began in this round."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self.is_closed or self._round != begun_in,
                min(timeout_s, threading.TIMEOUT_MAX),
            )

    def end_all(self) -> None:
        """End those that wait now."""
        with self._changed:
            self._round += 1
            self._changed.notify_all()

    def close(self) -> None:
        """End those that wait, and all that come."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()
