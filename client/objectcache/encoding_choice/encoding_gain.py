"""Whether layers are there sooner encoded: arithmetic alone, on rates that were measured."""

from __future__ import annotations

from dataclasses import dataclass

GAIN_MIN = 1.1  # what decoding costs the engine beside its time is not known, so gain something


@dataclass(frozen=True, slots=True)
class DeliveryRates:
    """Bytes a second, all of decoded bytes but `link_bytes_per_s`, which are on the wire.

    The engine's thread decodes, at `decode_bytes_per_s`, and computes nothing meanwhile. `ratio` is
    decoded bytes of one on the wire. `compute_s_per_byte` is the engine's time for a layer, over
    the layer's bytes.
    """

    link_bytes_per_s: float
    decode_bytes_per_s: float
    ratio: float
    compute_s_per_byte: float = 0.0

    @property
    def plain_s_per_byte(self) -> float:
        """Between two layers, over the bytes of one: the link and the engine work side by side."""
        return max(1 / self.link_bytes_per_s, self.compute_s_per_byte)

    @property
    def encoded_s_per_byte(self) -> float:
        """The same of layers that come encoded."""
        decode_s, link_s = 1 / self.decode_bytes_per_s, 1 / (self.ratio * self.link_bytes_per_s)
        return max(link_s, decode_s + self.compute_s_per_byte)

    @property
    def gain(self) -> float:
        """How many times as fast a prefix is through, encoded."""
        return self.plain_s_per_byte / self.encoded_s_per_byte

    @property
    def pays(self) -> bool:
        """Whether to ask for the encoding."""
        return self.gain >= GAIN_MIN
