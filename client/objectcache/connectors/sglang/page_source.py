"""Where pages that are to be stored come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from objectcache.payload import Bytes

Page = Sequence[Bytes]  # its memory in chunk order: strided arrays one behind the other


class PageSource(ABC):
    """Pages in memory of any kind."""

    def views(self, start: int, end: int) -> list[Bytes] | None:
        """Pages [start, end) as they lie in memory, each in one run and in chunk order; None where
        they do not, so that they must be read.
        """
        return None

    @abstractmethod
    def read(self, start: int, end: int, chunks: Bytes) -> None:
        """Copy pages [start, end) into `chunks`, uint8[end - start, num_layers, slice_bytes]."""


class HostPages(PageSource):
    """Pages of host memory."""

    def __init__(self, pages: Sequence[Page]) -> None:
        self._pages = pages

    def views(self, start: int, end: int) -> list[Bytes] | None:
        pages = self._pages[start:end]
        if all(len(page) == 1 and page[0].flags.c_contiguous for page in pages):
            return [page[0] for page in pages]
        return None

    def read(self, start: int, end: int, chunks: Bytes) -> None:
        for page, chunk in zip(self._pages[start:end], chunks, strict=True):
            read_page(page, chunk)


def fill_page(page: Page, chunk: Bytes) -> None:
    """Copy a chunk into a page's memory; each byte is copied once."""
    flat, offset = chunk.reshape(-1), 0
    for part in page:
        np.copyto(part, flat[offset : offset + part.size].reshape(part.shape))
        offset += part.size


def read_page(page: Page, chunk: Bytes) -> None:
    """Copy a page's memory into a chunk; each byte is copied once."""
    flat, offset = chunk.reshape(-1), 0
    for part in page:
        np.copyto(flat[offset : offset + part.size].reshape(part.shape), part)
        offset += part.size
