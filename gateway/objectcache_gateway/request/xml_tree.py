"""An XML body as a tree. The caller has capped its bytes; entities and DTDs are refused."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree.ElementTree import Element, ParseError

from defusedxml import DefusedXmlException
from defusedxml.ElementTree import fromstring

from objectcache_schemas.errors import InvalidRequest

__all__ = ["Element", "children", "local_name", "malformed", "root_of", "text_of"]


def root_of(body: bytes, name: str) -> Element:
    """The root of a document of this name; raises `InvalidRequest` (MalformedXML)."""
    try:
        root: Element = fromstring(body, forbid_dtd=True)
    except (ParseError, DefusedXmlException, ValueError, LookupError, RecursionError) as error:
        raise malformed(f"the body must be a {name} document") from error
    if local_name(root) != name:
        raise malformed(f"the body must be a {name} document")
    return root


def local_name(node: Element) -> str:
    """An element's name without its namespace."""
    return node.tag.rpartition("}")[2]


def children(node: Element, name: str) -> Iterator[Element]:
    """The children of this name."""
    return (child for child in node if local_name(child) == name)


def text_of(node: Element, name: str) -> str | None:
    """Text of the first child of this name; None where there is no such child."""
    child = next(children(node, name), None)
    return None if child is None else child.text or ""


def malformed(message: str) -> InvalidRequest:
    """For a body that is not what the operation takes."""
    return InvalidRequest(message, code="MalformedXML")
