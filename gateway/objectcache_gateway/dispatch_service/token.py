"""Who may ask: whoever has the token of dispatch.token_file."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from objectcache_runtime.private_files import read_private
from objectcache_schemas.errors import AccessDenied, InvalidRequest

BEARER = "bearer"  # a scheme is written in any case
TOKEN_CHARS_MIN, TOKEN_CHARS_MAX = 16, 256


def read_token(file: Path, setting: str = "dispatch.token_file") -> str:
    """The token that a file holds. Raises `InvalidRequest` where there is none that can be used."""
    try:
        data = read_private(file, TOKEN_CHARS_MAX + 2)
    except OSError as error:
        raise InvalidRequest(f"{setting} {file}: {error.strerror}") from error
    if data is None:
        raise InvalidRequest(f"{setting} {file} does not exist")
    token = data.decode("utf-8", "replace").strip()
    is_text = token.isascii() and token.isprintable() and " " not in token
    if not (is_text and TOKEN_CHARS_MIN <= len(token) <= TOKEN_CHARS_MAX):
        raise InvalidRequest(
            f"{setting} {file} must hold one line of {TOKEN_CHARS_MIN} to "
            f"{TOKEN_CHARS_MAX} visible ASCII characters, such as `openssl rand -hex 32` prints"
        )
    return token


class TokenCheck:
    """Lets requests in that show the token; all of them where there is none."""

    def __init__(self, token: str | None) -> None:
        self._sha256 = None if token is None else hashlib.sha256(token.encode()).digest()

    def check(self, authorization: str | None) -> None:
        """Raises `AccessDenied` (Unauthorized), the same for every reason."""
        if self._sha256 is None:
            return
        scheme, _, token = (authorization or "").partition(" ")
        shown = token.strip()[: TOKEN_CHARS_MAX + 1].encode("utf-8", "surrogateescape")
        is_right = hmac.compare_digest(hashlib.sha256(shown).digest(), self._sha256)
        if not (is_right and scheme.lower() == BEARER):
            raise AccessDenied(
                "give the token of dispatch.token_file as Authorization: Bearer TOKEN",
                code="Unauthorized",
            )
