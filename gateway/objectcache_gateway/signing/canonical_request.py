"""The canonical parts of a request: what SigV4 signs in place of the bytes that were sent."""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import quote_from_bytes, unquote_to_bytes

from objectcache_gateway.request.request_head import RequestHead, raw_query_pairs, wire_bytes

_UNRESERVED_PATH = re.compile(r"[A-Za-z0-9\-._~/]*")
_UNRESERVED = re.compile(r"[A-Za-z0-9\-._~]+")
_SPACES = re.compile(r"[ \t]+")


def canonical_paths(raw_path: str) -> list[str]:
    """The canonical URIs that a client may have signed for a path, likeliest first.

    S3 encodes each byte of the key once. Clients differ in what they do with an encoded slash and
    with characters that they sent unencoded, so a path with such has up to three.
    """
    path = raw_path or "/"
    if _UNRESERVED_PATH.fullmatch(path):
        return [path]
    wire = wire_bytes(path)
    segments = [quote_from_bytes(unquote_to_bytes(part), safe="~") for part in wire.split(b"/")]
    whole = quote_from_bytes(unquote_to_bytes(wire), safe="/~")
    return list(dict.fromkeys(["/".join(segments), whole, path]))


def canonical_query(raw_query: str) -> str:
    """The canonical query string, without X-Amz-Signature."""
    if not raw_query:
        return ""
    if _UNRESERVED.fullmatch(raw_query) and raw_query != "X-Amz-Signature":
        return f"{raw_query}="
    pairs = [
        (quote_from_bytes(name, safe="~"), quote_from_bytes(value, safe="~"))
        for name, value in raw_query_pairs(raw_query)
        if name != b"X-Amz-Signature"
    ]
    return "&".join([f"{name}={value}" for name, value in sorted(pairs)])


def canonical_headers(head: RequestHead, names: Sequence[str]) -> str:
    """One `name:value` line for each signed header; duplicates are joined with a comma."""
    values: dict[str, list[str]] = {name: [] for name in names}
    for name, value in head.headers:
        if name in values:
            text = value.strip(" \t")
            has_runs = "  " in text or "\t" in text
            values[name].append(_SPACES.sub(" ", text) if has_runs else text)
    return "".join([f"{name}:{','.join(values[name])}\n" for name in names])
