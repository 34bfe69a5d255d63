"""The link that the tests of partitions cut."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.figures.experiment import NotPossible
from benchmarks.figures.shaped_link import ShapedLink, shaped_link


@pytest.fixture(scope="module")
def link() -> Iterator[ShapedLink]:
    try:
        with shaped_link() as made:
            yield made
    except NotPossible as why:
        pytest.skip(f"no network namespace here: {why}")
