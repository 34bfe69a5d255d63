"""The head of a request as it came over the wire, before anything is decided about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import unquote_to_bytes

from objectcache_schemas.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class RequestHead:
    """Method, target and headers of one request.

    Header values and the target hold bytes that are not UTF-8 as surrogate escapes, as aiohttp
    hands them over.
    """

    method: str
    raw_path: str  # undecoded path of the target; an absolute-form target is stripped to its path
    raw_query: str  # undecoded, without the question mark
    headers: tuple[tuple[str, str], ...]  # lowercase names, values as received, duplicates kept
    _by_name: dict[str, str] | None = field(default=None, init=False, repr=False, compare=False)
    _query: tuple[tuple[str, str], ...] | None = field(
        default=None, init=False, repr=False, compare=False
    )

    def header(self, name: str) -> str | None:
        """Value of a header by its lowercase name; duplicates are joined with a comma."""
        if self._by_name is None:
            object.__setattr__(self, "_by_name", _joined(self.headers))
        assert self._by_name is not None
        return self._by_name.get(name)

    @property
    def query(self) -> tuple[tuple[str, str], ...]:
        """Decoded query pairs in order. A plus sign is a plus sign.

        Raises `InvalidRequest` for a name or value that is not UTF-8.
        """
        if self._query is None:
            pairs = raw_query_pairs(self.raw_query)
            decoded = tuple([(_text(name), _text(value)) for name, value in pairs])
            object.__setattr__(self, "_query", decoded)
        assert self._query is not None
        return self._query


def wire_bytes(text: str) -> bytes:
    """The bytes that a header value or a target had on the wire."""
    return text.encode("utf-8", "surrogateescape")


def raw_query_pairs(raw_query: str) -> list[tuple[bytes, bytes]]:
    """Percent-decoded pairs of a raw query, in order; `?delete` is `?delete=`."""
    pairs: list[tuple[bytes, bytes]] = []
    for part in wire_bytes(raw_query).split(b"&"):
        if part:
            name, _, value = part.partition(b"=")
            pairs.append((unquote_to_bytes(name), unquote_to_bytes(value)))
    return pairs


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest("the query string must be percent-encoded UTF-8") from error


def _joined(headers: tuple[tuple[str, str], ...]) -> dict[str, str]:
    by_name: dict[str, str] = {}
    for name, value in headers:
        by_name[name] = f"{by_name[name]},{value}" if name in by_name else value
    return by_name
