"""Entropy codes for one plane: bytes whose order holds nothing that a code could use.

Numbers of KV cache repeat no strings, so searching for them costs half the speed and finds none:
both coders are told to do Huffman coding alone. What they write are standard streams.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from typing import Any

import zstandard

from objectcache_encodings.frames import SliceCodec
from objectcache_schemas.errors import DamagedData

_inflate: Any
try:
    from isal import isal_zlib as _inflate
except ImportError:  # an optional dependency: two to four times as fast
    _inflate = zlib

# Matches of seven bytes, looked for in 64 places: none are found, and no time is lost on them.
_ZSTD_HUFFMAN_ONLY = {
    "strategy": zstandard.STRATEGY_FAST,
    "min_match": 7,
    "hash_log": 6,
    "chain_log": 6,
    "search_log": 1,
}
_ZSTD_WINDOW_LOG = 17  # the largest block of zstd, 128 KiB: what a decoder may have to keep
_DEFLATE_LEVEL, _DEFLATE_RAW, _DEFLATE_MEMORY = 6, -15, 9


class PlaneCoder(ABC):
    """Codes planes and decodes them. For one thread at a time."""

    @abstractmethod
    def encode(self, plane: memoryview) -> bytes:
        """The plane as a stream of its own."""

    @abstractmethod
    def decode(self, coded: memoryview, plane_bytes: int) -> bytes:
        """The plane of `plane_bytes` bytes that `coded` holds.

        Raises `DamagedData` where it holds none, a longer or a shorter one, or anything else
        behind it. Uses no more memory than the plane's own bytes and a fixed part, whatever `coded`
        claims.
        """


class ZstdPlanes(PlaneCoder):
    """A zstd frame, RFC 8878, that states its content's size."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(
            compression_params=zstandard.ZstdCompressionParameters(
                **_ZSTD_HUFFMAN_ONLY, window_log=_ZSTD_WINDOW_LOG
            )
        )
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=1 << _ZSTD_WINDOW_LOG)

    def encode(self, plane: memoryview) -> bytes:
        return self._compressor.compress(plane)

    def decode(self, coded: memoryview, plane_bytes: int) -> bytes:
        try:
            # What a frame states is allocated before anything is decoded.
            stated_bytes = zstandard.frame_content_size(coded)
            if stated_bytes == plane_bytes:
                return self._decompressor.decompress(coded, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise DamagedData(f"a plane is not what zstd can decode: {error}") from error
        raise DamagedData(f"a coded plane states {stated_bytes} bytes, not {plane_bytes}")


class DeflatePlanes(PlaneCoder):
    """A raw Deflate stream, RFC 1951."""

    def encode(self, plane: memoryview) -> bytes:
        # The encoder of isal looks for strings all the same, and its streams are longer.
        compressor = zlib.compressobj(
            _DEFLATE_LEVEL, zlib.DEFLATED, _DEFLATE_RAW, _DEFLATE_MEMORY, zlib.Z_HUFFMAN_ONLY
        )
        return compressor.compress(plane) + compressor.flush()

    def decode(self, coded: memoryview, plane_bytes: int) -> bytes:
        decompressor: Any = _inflate.decompressobj(_DEFLATE_RAW)
        try:
            # With room for a byte too many, so that the end of the stream is reached.
            plane: bytes = decompressor.decompress(coded, plane_bytes + 1)
        except (zlib.error, _inflate.error) as error:
            raise DamagedData(f"a plane is not what Deflate can decode: {error}") from error
        if len(plane) != plane_bytes or not decompressor.eof or decompressor.unused_data:
            raise DamagedData(f"a coded plane does not hold {plane_bytes} bytes and no more")
        return plane


def plane_coder(codec: SliceCodec) -> PlaneCoder:
    """A coder of its own; `codec` is not PLAIN."""
    return ZstdPlanes() if codec is SliceCodec.PLANES_ZSTD else DeflatePlanes()
