"""The number under which this server writes, and how many records it has made under it."""

from __future__ import annotations

import random
import threading

from objectcache_schemas.errors import Unavailable

WRITER_BITS = 63
REGISTER_S = 1.0  # that whoever asks for the number of a fenced server waits for the next one


class OwnWriter:
    """Changed by whoever holds the replay's lock; read from any thread."""

    def __init__(self) -> None:
        self.sequence = 0
        self.appended = 0  # records that are in the log, since the start
        self._entry = (_drawn(), False)  # the number, and whether a record of it is in the log
        self._changed = threading.Condition()  # and the lock of the entry

    @property
    def number(self) -> int:
        """The number, which may not be in the log yet."""
        return self._entry[0]

    @property
    def is_registered(self) -> bool:
        """Whether a record of it is in the log."""
        return self._entry[1]

    @property
    def entered(self) -> int:
        """The number, 0 while no record of it is in the log. Does not wait."""
        number, is_registered = self._entry
        return number if is_registered else 0

    def set_registered(self) -> None:
        """A record of it is in the log."""
        with self._changed:
            self.appended += 1
            self._entry = (self.number, True)
            self._changed.notify_all()

    def registered(self) -> int:
        """The number, under which objects may be stored. A server that was fenced is entered again
        by its next record, for which this waits a moment. Raises `Unavailable`.
        """
        with self._changed:
            number = self._changed.wait_for(lambda: self.entered, REGISTER_S)
        if not number:
            raise Unavailable("this server is not entered in the shared store's log yet; try again")
        return number

    def renew(self) -> None:
        """Go on under another number: this one was fenced."""
        with self._changed:
            self._entry, self.sequence = (_drawn(), False), 0

    def next_sequence(self) -> int:
        """The sequence number of the next record."""
        self.sequence += 1
        return self.sequence


def random_bits(count: int) -> int:
    """A number that nobody else draws."""
    return random.SystemRandom().getrandbits(count)


def _drawn() -> int:
    return random_bits(WRITER_BITS) | 1  # never 0
