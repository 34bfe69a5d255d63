"""What a client says of a request and nothing depends on: its id, its trace, its own time.

None of it is trusted, whichever way it comes: ids go into logs, traces and error documents, so
anything out of its form is dropped before it gets there.
"""

from __future__ import annotations

import re
import secrets

CLIENT_SECONDS_MAX = 3600.0
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
# W3C Trace Context, version 00: neither id is all zeros.
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def new_request_id() -> str:
    """16 hex digits, for the client's log and the servers'."""
    return secrets.token_hex(8).upper()


def adopted_request_id(text: str | None) -> str | None:
    """The client's id for its request; None where it sent none that can be used."""
    return text if text is not None and _REQUEST_ID.fullmatch(text) else None


def adopted_client_s(seconds: float) -> float:
    """What the client says it spent before it sent the request; 0 where that is nonsense."""
    return seconds if 0.0 <= seconds <= CLIENT_SECONDS_MAX else 0.0


def adopted_traceparent(text: str) -> str:
    """What a client calls its trace; empty where that is not in W3C's form."""
    return text if _TRACEPARENT.fullmatch(text) else ""
