"""In which encodings a fetcher has chunks come: those that were set, or any where that pays."""

from __future__ import annotations

from objectcache.encoding_choice.encoding_account import EncodingAccounts, EndedDelivery
from objectcache_encodings.frames import ENCODINGS

AUTO = "auto"  # in the place of encodings


class AskedEncodings:
    """Get by get."""

    def __init__(self, encodings: tuple[str, ...] = (), workers: int = 1) -> None:
        """`encodings` is fetcher.encodings; `workers` decode."""
        self._encodings = tuple(ENCODINGS) if encodings == (AUTO,) else encodings
        self._accounts = EncodingAccounts(workers) if encodings == (AUTO,) else None

    def of(self, bucket: str) -> tuple[str, ...]:
        """For the next get from a bucket."""
        if self._accounts is not None and not self._accounts.asks(bucket):
            return ()
        return self._encodings

    def ended(self, bucket: str, seen: EndedDelivery | None) -> None:
        """A get has ended of which this was seen."""
        if self._accounts is not None and seen is not None:
            self._accounts.ended(bucket, seen)

    def __repr__(self) -> str:
        return f"<AskedEncodings {', '.join(self._encodings)}, {self._accounts!r}>"
