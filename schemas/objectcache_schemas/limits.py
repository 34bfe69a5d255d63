"""Limits that both sides of a wire enforce; gateway and storage server must agree on them."""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec
from msgspec import Meta

KEY_BYTES_MAX = 1024  # S3's own limit on a key, in bytes of UTF-8
USER_METADATA_BYTES_MAX = 2048  # S3's own limit on x-amz-meta-*
# Of one bucket's configuration. All but the last are S3's own.
LIFECYCLE_RULES_MAX = 1000
RULE_ID_CHARACTERS_MAX = 255
RULE_PREFIX_BYTES_MAX = KEY_BYTES_MAX
BUCKET_TAGS_MAX = 50
TAG_KEY_CHARACTERS_MAX = 128
TAG_VALUE_CHARACTERS_MAX = 256
ACL_GRANTS_MAX = 100
CONFIGURATION_BYTES_MAX = 256 << 10  # as msgpack; every gateway keeps some, and sweeps read all

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
BYTES_PER_GBIT = 1e9 / 8  # rates in Gbps are 10^9 bits per second
CAP_GBPS_MIN = 0.001  # 125 KB/s; less would hold deliveries for hours without a word
CAP_GBPS_MAX = 100_000.0
NIC_RATE_MIN = 64 * KIB  # bytes per second, of a storage NIC; less would hold deliveries for hours
NIC_RATE_MAX = 1e15
# Of nodes, workers and NICs: such a name stands in a path, and in a label of a metric.
NAME_PATTERN = r"^[A-Za-z0-9_.:@=+~-]{1,128}\Z"
NAME_WORDS = "1 to 128 letters, digits and any of _.:@=+~-"
# Words of routes: of a relay that is called so nobody could say whether it is meant.
ROUTE_WORDS = ("auto", "direct", "split", "fetcher")


Positive = Annotated[int, Meta(ge=1)]


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Agreed limits. A fingerprint of all of them is exchanged when two processes meet."""

    descriptor_bytes_max: Annotated[
        Positive, Meta(description="of one descriptor; 64 Ki keys of 64 hex digits are 4.2 MiB")
    ] = 8 * MIB
    descriptor_header_bytes_max: Annotated[
        Positive, Meta(description="of a descriptor in a header; larger ones use POST")
    ] = 16 * KIB
    chunks_per_descriptor_max: Annotated[
        Positive, Meta(description="chunks of one prefix; a million tokens at 16 tokens a chunk")
    ] = 65_536
    put_chunks_max: Annotated[
        Positive, Meta(description="chunks staged at once by one kv-put; each holds an open file")
    ] = 4096
    payload_bytes_max: Annotated[Positive, Meta(description="of one delivery or one kv-put")] = (
        64 * GIB
    )
    object_bytes_max: Annotated[Positive, Meta(description="of one PUT or one part; S3's own")] = (
        5 * GIB
    )
    joined_object_bytes_max: Annotated[
        Positive, Meta(description="of an object that a multipart upload made; S3's own")
    ] = 5 * TIB
    xml_body_bytes_max: Annotated[
        Positive, Meta(description="of an XML body: a delete of 1,000 keys, 10,000 parts")
    ] = 2 * MIB

    def fingerprint(self) -> bytes:
        """16 bytes that differ when any limit differs."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).digest()[:16]
