"""S3's XML errors from a peer that is not trusted to send any."""

from __future__ import annotations

from xml.parsers import expat

ERROR_BODY_BYTES_MAX = 64 << 10


class _Refused(Exception):
    """The document has something that no error has."""


def parse_error_fields(data: bytes) -> dict[str, str]:
    """Texts of the elements directly below the root, by element name.

    Empty for anything that is not a small well-formed document without a DTD: expansion bombs and
    external entities need one.
    """
    if len(data) > ERROR_BODY_BYTES_MAX:
        return {}
    fields: dict[str, str] = {}
    path: list[str] = []

    def start(name: str, _attributes: dict[str, str]) -> None:
        path.append(name)

    def end(_name: str) -> None:
        path.pop()

    def text(characters: str) -> None:
        if len(path) == 2:
            fields[path[1]] = fields.get(path[1], "") + characters

    parser = expat.ParserCreate()
    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.CharacterDataHandler = text
    parser.StartDoctypeDeclHandler = _refuse
    parser.EntityDeclHandler = _refuse
    parser.ExternalEntityRefHandler = _refuse
    try:
        parser.Parse(data, True)
    except (expat.ExpatError, _Refused, ValueError):
        return {}
    return fields


def _refuse(*_arguments: object) -> int:
    raise _Refused
