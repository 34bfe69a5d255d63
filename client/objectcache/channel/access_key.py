"""Who signs requests."""

from __future__ import annotations

from typing import NamedTuple


class SigningKey(NamedTuple):
    """Credentials. `session_token` goes with temporary ones only."""

    access_key: str
    secret_key: str
    session_token: str | None = None

    def __repr__(self) -> str:
        return f"SigningKey({self.access_key!r}, ...)"
