"""Key pairs that nobody could guess."""

from __future__ import annotations

import secrets

_PREFIX = "OC"
_ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"


def made_up_access_key() -> str:
    """An access key of the form that clients know."""
    return _PREFIX + "".join(secrets.choice(_ALPHABET) for _ in range(18))


def made_up_secret_key() -> str:
    """A secret of 240 random bits."""
    return secrets.token_urlsafe(30)
