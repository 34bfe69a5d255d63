"""Limits that both sides of a wire enforce; gateway and storage server must agree on them."""

from __future__ import annotations

import hashlib

import msgspec

KEY_BYTES_MAX = 1024  # S3's own limit on a key, in bytes of UTF-8
USER_METADATA_BYTES_MAX = 2048  # S3's own limit on x-amz-meta-*

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Agreed limits. A fingerprint of all of them is exchanged when two processes meet."""

    descriptor_bytes_max: int = 8 * MIB  # 64 Ki keys of 64 hex digits are 4.2 MiB
    descriptor_header_bytes_max: int = 16 * KIB  # base64url in a header; larger ones use POST
    chunks_per_descriptor_max: int = 65_536  # a million tokens at 16 tokens a chunk
    put_chunks_max: int = 4096  # chunks staged at once by one kv-put; each holds an open file
    payload_bytes_max: int = 64 * GIB  # of one delivery or one kv-put
    object_bytes_max: int = 5 * GIB  # of one PUT or one part; S3's own
    xml_body_bytes_max: int = 2 * MIB  # a delete of 1,000 keys, a complete of 10,000 parts

    def fingerprint(self) -> bytes:
        """16 bytes that differ when any limit differs."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).digest()[:16]
