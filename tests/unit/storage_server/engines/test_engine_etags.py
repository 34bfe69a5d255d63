"""The ETag of an object's content is as documented, byte for byte."""

from __future__ import annotations

import hashlib
from array import array

from objectcache_storage_server.engines.content_etags import content_etag


def test_the_etag_hashes_size_and_checksums_as_little_endian_numbers() -> None:
    packed = b"\x05" + bytes(7) + b"\x02\x01" + bytes(6) + b"\xff" * 8
    expected = hashlib.sha256(packed).hexdigest()[:32] + "-1"
    assert content_etag(5, array("Q", [0x0102, 2**64 - 1])) == expected
