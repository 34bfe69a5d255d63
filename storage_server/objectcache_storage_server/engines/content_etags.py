"""The ETag of an object whose writer gave none. Pure: sizes and checksums in, text out."""

from __future__ import annotations

import hashlib
import struct
from array import array

ETAG_HASH_BYTES = 16  # as long as the MD5 that most ETags are


def content_etag(size_bytes: int, checksums: array[int]) -> str:
    """ETag of an object of `size_bytes` whose blocks have these checksums (each a u64).

    The first ETAG_HASH_BYTES of the SHA-256 of size and checksums, each as a little-endian u64, in
    hex, then "-1": the dash tells S3 clients that it is no MD5, as in the ETag of a multipart
    upload.
    """
    digest = hashlib.sha256(struct.pack("<Q", size_bytes) + checksums.tobytes())
    return f"{digest.hexdigest()[: 2 * ETAG_HASH_BYTES]}-1"
