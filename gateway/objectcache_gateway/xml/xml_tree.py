"""An XML body as a tree, read by one thread besides the event loop's where it is large.

The caller has capped its bytes. What a hostile body could make dear is bounded here: elements,
their depth and attributes, and the bytes of one tag; a document type, without which there are no
entities, is refused. Names lose their namespace.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar
from xml.etree.ElementTree import Element
from xml.parsers import expat

from objectcache_schemas.errors import InvalidRequest

SMALL_XML_BYTES_MAX = 128 << 10  # of tags, lists and locations: 50 tags of S3's longest are 100 KiB
ELEMENTS_MAX = 10_000  # 1,000 keys to delete have 6,000, 1,000 lifecycle rules 9,000
DEPTH_MAX = 16  # S3's documents need 6
ATTRIBUTES_MAX = 16  # of one element; S3's have a namespace and a type
TAG_BYTES_MAX = 64 << 10
THREAD_BYTES_MIN = 16 << 10  # a millisecond or two of the densest markup
_FEED_BYTES = 16 << 10

# One thread: any number of large bodies takes no more of the interpreter from the event loop.
_PARSING = ThreadPoolExecutor(1, thread_name_prefix="objectcache-xml")

T = TypeVar("T")


async def parse_apart(parse: Callable[[bytes], T], body: bytes) -> T:
    """`parse(body)`, in a thread where the body is so large that it would hold others up."""
    if len(body) < THREAD_BYTES_MIN:
        return parse(body)
    return await asyncio.get_running_loop().run_in_executor(_PARSING, partial(parse, body))


def root_of(body: bytes, name: str, elements_max: int = ELEMENTS_MAX) -> Element:
    """The root of a document of this name; raises `InvalidRequest` (MalformedXML)."""
    try:
        root = _Tree(elements_max).read(body)
    except (expat.ExpatError, ValueError, LookupError) as error:
        raise malformed(f"the body must be a {name} document") from error
    if root.tag != name:
        raise malformed(f"the body must be a {name} document")
    return root


def malformed(message: str) -> InvalidRequest:
    """For a body that is not what the operation takes."""
    return InvalidRequest(message, code="MalformedXML")


class _Tree:
    """Elements as the parser meets them; text after a child is left out."""

    def __init__(self, elements_max: int) -> None:
        self._elements_max = elements_max
        self._element_count = 0
        self._open: list[Element] = []
        self._root: Element | None = None
        self._parser = expat.ParserCreate()
        self._parser.buffer_text = True
        self._parser.StartElementHandler = self._start
        self._parser.EndElementHandler = self._end
        self._parser.CharacterDataHandler = self._text
        self._parser.StartDoctypeDeclHandler = self._refuse_doctype

    def read(self, body: bytes) -> Element:
        """The root. Raises `InvalidRequest`, and what the parser raises."""
        for start in range(0, len(body), _FEED_BYTES):
            fed = body[start : start + _FEED_BYTES]
            self._parser.Parse(fed, False)
            if start + len(fed) - self._parser.CurrentByteIndex > TAG_BYTES_MAX:
                raise malformed(f"the body holds a tag of over {TAG_BYTES_MAX} bytes")
        self._parser.Parse(b"", True)
        assert self._root is not None  # the parser takes no document without an element
        return self._root

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self._element_count += 1
        if self._element_count > self._elements_max:
            raise malformed(f"the body has more than {self._elements_max} elements")
        if len(attributes) > ATTRIBUTES_MAX:
            raise malformed(f"an element has more than {ATTRIBUTES_MAX} attributes")
        node = Element(name.rpartition(":")[2])
        if self._open:
            self._open[-1].append(node)
        else:
            self._root = node
        self._open.append(node)
        if len(self._open) > DEPTH_MAX:
            raise malformed(f"the body is deeper than {DEPTH_MAX} elements")

    def _end(self, name: str) -> None:
        self._open.pop()

    def _text(self, text: str) -> None:
        node = self._open[-1]
        if not len(node):
            node.text = (node.text or "") + text

    def _refuse_doctype(self, *_: object) -> None:
        raise malformed("the body must not have a document type")
