"""Tags of objects and buckets, as headers and XML bring them. Pure."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from urllib.parse import unquote_to_bytes

from objectcache_gateway.request.request_head import RequestHead, wire_bytes
from objectcache_gateway.xml.xml_tree import malformed, root_of
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import TAG_KEY_CHARACTERS_MAX, TAG_VALUE_CHARACTERS_MAX

OBJECT_TAGS_MAX = 10  # S3's own
RESERVED_PREFIX = "aws:"
_PUNCTUATION = frozenset("_.:/=+-@")
_CATEGORIES = frozenset("LNZ")  # letters, numbers and spaces of any script


def tags_of_header(head: RequestHead) -> dict[str, str]:
    """Tags of x-amz-tagging, which is written as a query; raises `InvalidRequest` (InvalidTag)."""
    header = head.header("x-amz-tagging")
    if header is None:
        return {}
    pairs: list[tuple[str, str]] = []
    for part in header.split("&"):
        if part:
            name, _, value = part.partition("=")
            pairs.append((_decoded(name), _decoded(value)))
    return checked_tags(pairs, OBJECT_TAGS_MAX)


def parse_tagging(body: bytes, count_max: int) -> dict[str, str]:
    """Tags of a Tagging document; raises `InvalidRequest`: MalformedXML, or InvalidTag."""
    tag_sets = root_of(body, "Tagging").findall("TagSet")
    if len(tag_sets) != 1:
        raise malformed("Tagging must hold one TagSet")
    pairs: list[tuple[str, str]] = []
    for tag in tag_sets[0]:
        key, value = tag.findtext("Key"), tag.findtext("Value")
        if key is None or value is None:
            raise malformed("a Tag must hold a Key and a Value")
        pairs.append((key, value))
    return checked_tags(pairs, count_max)


def checked_tags(pairs: Iterable[tuple[str, str]], count_max: int) -> dict[str, str]:
    """The tags by key, as they are shown. Raises `InvalidRequest` (InvalidTag)."""
    tags: dict[str, str] = {}
    for key, value in pairs:
        if key in tags:
            raise _invalid(f"the tag {key!r} is named twice")
        _check_text("a tag's key", key, TAG_KEY_CHARACTERS_MAX)
        _check_text("a tag's value", value, TAG_VALUE_CHARACTERS_MAX)
        if not key:
            raise _invalid("a tag's key must not be empty")
        if key.lower().startswith(RESERVED_PREFIX):
            raise _invalid(f"a tag's key must not begin with {RESERVED_PREFIX}")
        tags[key] = value
    if len(tags) > count_max:
        raise _invalid(f"{len(tags)} tags are given, {count_max} are allowed")
    return dict(sorted(tags.items()))


def _check_text(what: str, text: str, characters_max: int) -> None:
    if len(text) > characters_max:
        raise _invalid(f"{what} has {len(text)} characters, {characters_max} are allowed")
    if not all(
        character in _PUNCTUATION or unicodedata.category(character)[0] in _CATEGORIES
        for character in text
    ):
        raise _invalid(f"{what} may hold letters, numbers, spaces and {''.join(_PUNCTUATION)} only")


def _decoded(text: str) -> str:
    try:
        return unquote_to_bytes(wire_bytes(text.replace("+", " "))).decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest("x-amz-tagging must be percent-encoded UTF-8") from error


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="InvalidTag")
