"""The route that a delivery has taken, and why."""

from __future__ import annotations


class TakenRoute:
    """`word` is `direct`, `relay:NODE` or `split:..`, as it is now: where a source failed, that of
    the one that goes on. `reason` says why in words for people. Reading needs no lock.
    """

    def __init__(self, word: str, reason: str) -> None:
        self.word = word
        self.reason = reason

    def change(self, word: str, reason: str) -> None:
        """The delivery goes on by another route."""
        self.word, self.reason = word, reason

    def __repr__(self) -> str:
        return f"<TakenRoute {self.word}: {self.reason}>"


def only_direct() -> TakenRoute:
    """Of a client without relays."""
    return TakenRoute("direct", "there are no relays")
