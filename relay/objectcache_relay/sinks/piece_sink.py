"""Where pieces go on to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from objectcache_relay.landing.landed_rows import LandedRow
from objectcache_relay.landing.landing_regions import LandingRegion
from objectcache_schemas.errors import ObjectCacheError

WriteEnded = Callable[[ObjectCacheError | None], None]


@dataclass(frozen=True, slots=True)
class LandedPiece:
    """A piece of a decoded payload, from `offset_bytes` of it on, and where it lies: in `rows` of
    the region. Of a payload that came as it is that is one row, and `view`, else empty.
    """

    region: LandingRegion
    offset_bytes: int
    view: memoryview
    rows: tuple[LandedRow, ...]


class PieceSink(ABC):
    """One delivery's way to its engine. Used in the event loop."""

    @abstractmethod
    def write(self, piece: LandedPiece, ended: WriteEnded) -> None:
        """Begin to write a piece of the payload. `ended` is called once, from any thread; until
        then the region is read.
        """

    @property
    def decode_s(self) -> float:
        """Seconds that decoding has taken, as long as all decoders work: 0 where nothing is."""
        return 0.0

    @abstractmethod
    def announce(self, end_layer: int) -> None:
        """Tell the engine that its layers below `end_layer` are in place."""

    def stop(self) -> None:  # noqa: B027 - what is under way cannot be taken back everywhere
        """Nobody wants the pieces that are not written yet: end those that can be."""

    def close(self) -> None:  # noqa: B027 - not all hold something
        """Nothing comes any more, and nothing is being written."""
