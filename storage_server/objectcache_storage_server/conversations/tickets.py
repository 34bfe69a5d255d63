"""Tickets: how an identity that HTTP authenticated joins the target socket.

Time is an argument. A ticket is good once and for a short time. Safe to use from any thread: engine
threads issue, the event loop redeems.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from typing import NamedTuple

from objectcache_schemas.errors import AccessDenied, Busy

TICKET_BYTES = 32
TICKET_LIFE_S = 30.0
TICKETS_MAX = 4096


class Holder(NamedTuple):
    """Who a ticket was given to."""

    identity: str
    access_key: str  # that signed the request for it


class TicketBook:
    """Tickets that were given out and not yet redeemed."""

    def __init__(self) -> None:
        self._holders: dict[bytes, tuple[Holder, float]] = {}  # by hash, in order of expiry
        self._lock = threading.Lock()

    def issue(self, identity: str, now_s: float, access_key: str = "") -> bytes:
        """A ticket for `identity`. Raises `Busy` when too many are open."""
        ticket = secrets.token_bytes(TICKET_BYTES)
        with self._lock:
            self._forget_expired(now_s)
            if len(self._holders) >= TICKETS_MAX:
                raise Busy(f"{TICKETS_MAX} sessions are being opened", retry_after_s=TICKET_LIFE_S)
            holder = Holder(identity, access_key)
            self._holders[_digest(ticket)] = (holder, now_s + TICKET_LIFE_S)
        return ticket

    def redeem(self, ticket: bytes, now_s: float) -> Holder:
        """Who is behind a ticket, which is void from now on. Raises `AccessDenied`."""
        with self._lock:
            self._forget_expired(now_s)
            entry = self._holders.pop(_digest(ticket), None)
        if entry is None:
            raise AccessDenied("the session ticket is unknown, used or expired; ask for another")
        return entry[0]

    def _forget_expired(self, now_s: float) -> None:
        while self._holders:
            digest = next(iter(self._holders))
            if self._holders[digest][1] > now_s:
                return
            del self._holders[digest]


def _digest(ticket: bytes) -> bytes:
    # Looking up a hash takes a time that says nothing about the tickets that exist.
    return hashlib.sha256(ticket).digest()
