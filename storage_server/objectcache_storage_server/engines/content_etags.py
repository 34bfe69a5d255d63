"""The ETag of an object whose writer gave none. Pure: sizes and checksums in, text out."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

ETAG_HASH_BYTES = 16  # as long as the MD5 that most ETags are


def content_etag(size_bytes: int, checksums: Sequence[int]) -> str:
    """ETag of an object of `size_bytes` whose blocks have these checksums (each a u64).

    The first ETAG_HASH_BYTES of the SHA-256 of size and checksums, each as a little-endian u64, in
    hex, then "-1": the dash tells S3 clients that it is no MD5, as in the ETag of a multipart
    upload.
    """
    packed = struct.pack(f"<{1 + len(checksums)}Q", size_bytes, *checksums)
    return f"{hashlib.sha256(packed).digest()[:ETAG_HASH_BYTES].hex()}-1"
