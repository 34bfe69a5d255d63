"""The page is made in a thread, while the event loop goes on."""

from __future__ import annotations

from typing import Any

import pytest

from objectcache_relay.decoding.decoded_regions import DecodedRegions
from objectcache_relay.relay_families import relay_page
from tests.unit.documents.metric_names import relay_means


class Ending:
    """A get that ends as it is looked at."""

    def __init__(self, running: dict[Any, None], awaited_bytes: int) -> None:
        self._running = running
        self._awaited_bytes = awaited_bytes

    @property
    def awaited_bytes(self) -> int:
        del self._running[self]
        return self._awaited_bytes


def test_gets_that_end_meanwhile_spoil_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    means = relay_means()
    running: dict[Any, None] = {}
    for awaited_bytes in (1, 20, 300):
        running[Ending(running, awaited_bytes)] = None
    monkeypatch.setattr(means.landings, "_running", running)
    page = relay_page(means, None, DecodedRegions(0)).text().decode()
    assert "objectcache_relay_read_queue_bytes 321.0" in page.splitlines()
