"""The number under which a server writes: entered or not, and never another than was entered."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from objectcache_schemas.errors import StorageFull, Unavailable
from objectcache_storage_server.engines.shared.log.writers import own_writer
from objectcache_storage_server.engines.shared.log.writers.own_writer import OwnWriter
from tests.unit.storage_server.engines.shared.catalogs import soon, until
from tests.unit.storage_server.engines.shared.log.conftest import Opened
from tests.unit.storage_server.engines.shared.log.test_racing_changes import count_up


def test_a_number_that_is_told_has_a_record() -> None:
    own = OwnWriter()
    first = own.number
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(own.registered)
        until(asking.running)
        time.sleep(0.1)  # it waits by then; were it later, nothing here would be otherwise
        own.set_registered()
        own.renew()  # before who waited has looked
        try:
            assert asking.result() == first
        except Unavailable:
            assert own.entered == 0


def test_looking_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_writer, "REGISTER_S", 0.0)
    own = OwnWriter()
    assert own.entered == 0
    with pytest.raises(Unavailable, match="not entered"):
        own.registered()
    own.set_registered()
    assert own.entered == own.registered() == own.number


def test_heartbeats_are_tried_while_changes_are_and_fail(
    opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    server = opened("one", heartbeat_s=0.5)
    server.store.is_full = server.store.records_are_refused = True
    is_over = threading.Event()

    def change() -> None:
        while not is_over.is_set():
            with pytest.raises(StorageFull):
                server.catalog.change(count_up, soon())

    thread = threading.Thread(target=change)
    thread.start()
    try:
        until(lambda: "no heartbeat could be appended" in caplog.text)
    finally:
        is_over.set()
        thread.join()
        server.store.is_full = False
