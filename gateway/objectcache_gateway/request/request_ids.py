"""What the server calls a request."""

from __future__ import annotations

import secrets


def new_request_id() -> str:
    """16 hex digits, for the client's log and ours."""
    return secrets.token_hex(8).upper()
