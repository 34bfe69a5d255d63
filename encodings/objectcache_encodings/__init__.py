"""How a slice's bytes are stored and sent so that they are fewer, without losing one.

    encoder = SliceEncoder("planes-zstd", element_bytes=2)      # bf16
    row = pack_row(encoder.encode_slices(slices))               # uint8[n, pitch]
    ...
    SliceDecoder().decode_row(row, out)                         # uint8[n, slice_bytes]

An encoding is not part of what a chunk is: its key, size and ETag are those of the decoded bytes.
"""

from objectcache_encodings.decoder import SliceDecoder
from objectcache_encodings.element_sizes import element_bytes_of, smallest_element_bytes
from objectcache_encodings.encoder import SliceEncoder
from objectcache_encodings.frames import (
    ENCODINGS,
    HEADER_BYTES,
    SliceCodec,
    frame_bytes_max,
    pack_row,
    slice_checksums,
)

__all__ = [
    "ENCODINGS",
    "HEADER_BYTES",
    "SliceCodec",
    "SliceDecoder",
    "SliceEncoder",
    "element_bytes_of",
    "frame_bytes_max",
    "pack_row",
    "slice_checksums",
    "smallest_element_bytes",
]
