"""Object keys as UTF-8 bytes, which is the order of every listing, and as hashes. Pure."""

from __future__ import annotations

import xxhash

from objectcache_schemas.errors import InvalidRequest

BUCKET_BYTES = 4  # of a bucket's number, big-endian, before a key

_AFTER_ALL_KEYS = b"\xff"  # no UTF-8 text holds this byte


def key_bytes(key: str) -> bytes:
    """The key's UTF-8 bytes; raises `InvalidRequest` for lone surrogates, which have none."""
    try:
        return key.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"key {key!r} is not valid Unicode text") from error


def scan_bounds(prefix: str, start_after: str) -> tuple[bytes, bytes]:
    """First and end of the keys with `prefix` that are greater than `start_after`.

    In bytes both neighbours are exact: a key's successor has one zero byte more, and a prefix's end
    is the prefix with its last byte raised, for no UTF-8 byte is 0xff.
    """
    first = prefix_bytes = key_bytes(prefix)
    end = prefix_bytes[:-1] + bytes([prefix_bytes[-1] + 1]) if prefix else _AFTER_ALL_KEYS
    after = key_bytes(start_after)
    if start_after and after >= first:
        first = after + b"\0"
    return first, end


def key_text(key: bytes) -> str:
    """A stored key, which rot may have made something else than UTF-8."""
    return key.decode(errors="surrogateescape")


def key_raw(key: str) -> bytes:
    """What `key_text` was made of."""
    return key.encode(errors="surrogateescape")


def key_hash(bucket_number: int, key: str) -> int:
    """xxh3_64 of a bucket's number and a key; never 0, which stands for no key."""
    return raw_hash(bucket_number.to_bytes(BUCKET_BYTES, "big") + key.encode())


def raw_hash(raw: bytes) -> int:
    """`key_hash` of a bucket's number and a key's bytes, as they are stored."""
    return xxhash.xxh3_64_intdigest(raw) or 1
