"""What of a peer's text an error may repeat."""

from __future__ import annotations

EXCERPT_CHARS_MAX = 160  # far above every name there is; a descriptor has room for megabytes


def excerpt(text: str) -> str:
    """The text, or its beginning and how long it was."""
    if len(text) <= EXCERPT_CHARS_MAX:
        return text
    return f"{text[:EXCERPT_CHARS_MAX]}... ({len(text)} characters)"
