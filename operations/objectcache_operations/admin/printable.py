"""Text of others as it may stand on a terminal. Pure."""

from __future__ import annotations


def printable(text: str) -> str:
    """Keys and names come from clients, and may hold what steers a terminal."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def window_source_text(source: str) -> str:
    """Where a compute window came from: `descriptor` is a word of the wire, for what was told."""
    return "told" if source == "descriptor" else source
