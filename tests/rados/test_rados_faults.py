"""The store in RADOS when parts of Ceph are away. A call that waits for them longer than for its
deadline fails its test by the time that a test may take.
"""

from __future__ import annotations

import errno
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from objectcache_schemas.errors import InvalidRequest, StorageFull, Unavailable
from objectcache_storage_server.engines.stores.rados.log_frames import LogEnd
from objectcache_storage_server.engines.stores.rados.operations import WriteAnswer
from objectcache_storage_server.engines.stores.rados.rados_store import OSD_TIMEOUT_S, RadosStore
from objectcache_storage_server.engines.stores.shared_store import (
    LostObject,
    ObjectRead,
    StoreTimeout,
)
from tests.ceph import CephCluster
from tests.contract.engine_suite import content
from tests.rados.conftest import Open, within

SHORT_S = 0.5
BEGUN_S = 2.0  # in which a busy machine has a call reach the OSD, or a busy OSD answer


def put(store: RadosStore, name: str, data: bytes, seconds: float = 60.0) -> None:
    store.put(name, [memoryview(data)], within(seconds))


def test_every_call_ends_at_its_deadline_while_no_osd_answers(
    cluster: CephCluster, open_store: Open
) -> None:
    store = open_store()
    put(store, "w/1", b"there")
    assert store.append(0, b"record", within())
    begun_s = time.monotonic()
    with cluster.paused_osds():
        landing = memoryview(bytearray(5))
        for call in (
            store.begin_reads([ObjectRead("w/1", 0, landing)], within(SHORT_S)).result,
            lambda: put(store, "w/2", b"new", SHORT_S),
            lambda: store.get("w/1", within(SHORT_S)),
            lambda: list(store.list_objects("", within(SHORT_S))),
            lambda: store.delete(["w/1"], within(SHORT_S)),
            lambda: store.append(1, b"new", within(SHORT_S)),
            lambda: store.read_log(0, 1 << 20, within(SHORT_S)),
            lambda: store.log_end(0, within(SHORT_S)),
            lambda: store.trim_log(1, within(SHORT_S)),
        ):
            with pytest.raises(StoreTimeout):
                call()
        # The library's own timeout, which stands behind the deadlines, has not come yet.
        assert time.monotonic() - begun_s < OSD_TIMEOUT_S
    assert store.log_end(0, within()) in (1, 2)


def test_a_read_that_timed_out_touches_its_landing_no_more(
    cluster: CephCluster, open_store: Open
) -> None:
    store = open_store()
    data = content("late", 1 << 20)
    put(store, "w/1", data)
    landing = bytearray(len(data))
    with cluster.paused_osds():
        batch = store.begin_reads([ObjectRead("w/1", 0, memoryview(landing))], within(SHORT_S))
        with pytest.raises(StoreTimeout):
            batch.result()
        landing[:] = b"\7" * len(data)  # somebody else's by now
    # The OSD answers in order: what is read now was answered after the read that timed out.
    assert store.get("w/1", within()) == data
    assert landing == b"\7" * len(data)


def test_what_became_of_an_append_without_an_answer_is_read_from_the_log(
    cluster: CephCluster, open_store: Open
) -> None:
    store, other = open_store(), open_store()
    assert store.append(0, b"first", within())
    with cluster.paused_osds(), pytest.raises(StoreTimeout, match="record 1"):
        store.append(1, b"unknown", within(BEGUN_S))
    # It had reached the OSD, which carried it out when it went on.
    assert store.read_log(0, 1 << 20, within()) == [b"first", b"unknown"]
    assert not store.append(1, b"unknown", within())
    assert not other.append(1, b"other", within())
    assert other.append(2, b"next", within())


def test_an_append_that_could_not_be_begun_is_not_unknown(
    cluster: CephCluster, open_store: Open
) -> None:
    store, other = open_store(), open_store()
    assert store.append(0, b"first", within())
    with cluster.paused_osds(), pytest.raises(Unavailable) as caught:
        other.append(1, b"never", within(SHORT_S))  # this handle must look first
    assert not isinstance(caught.value, StoreTimeout)
    assert store.read_log(0, 1 << 20, within()) == [b"first"]


def test_nothing_acknowledged_is_lost_when_osds_are_killed_in_the_middle(
    cluster: CephCluster, open_store: Open
) -> None:
    store, other = open_store(), open_store()
    acknowledged: set[int] = set()
    records: list[bytes] = []
    is_done = threading.Event()

    def put_until_done(first: int) -> None:
        number = first
        while not is_done.is_set():
            try:
                put(store, f"w/{number}", content(number, 100_000), BEGUN_S)
            except Unavailable:
                continue
            acknowledged.add(number)
            number += 4

    def append_until_done() -> None:
        while not is_done.is_set():
            record = f"record {len(records)}".encode()
            try:
                assert store.append(len(records), record, within(BEGUN_S))
            except StoreTimeout:
                settle(record)
            except Unavailable:
                continue
            else:
                records.append(record)

    def settle(record: bytes) -> None:
        """Whether the record is in the log, once something is known to come after it."""
        number = len(records)
        while True:
            try:
                if not store.append(number, b"settled", within(BEGUN_S)):
                    records.extend(store.read_log(number, 1 << 20, within()))
                    assert set(records[number:]) <= {record, b"settled"}
                    return
                records.append(b"settled")
                return
            except Unavailable:
                continue

    assert other.append(0, b"before", within())
    records.append(b"before")
    with ThreadPoolExecutor(5) as threads:
        tasks = [threads.submit(put_until_done, first) for first in range(4)]
        tasks.append(threads.submit(append_until_done))
        while len(acknowledged) < 20:
            time.sleep(0.01)
        for osd in cluster.osds:
            cluster.kill_osd(osd)
        for osd in cluster.osds:
            cluster.start_osd(osd)
        cluster.wait_for_osds(len(cluster.osds))
        before, records_before = len(acknowledged), len(records)
        while len(acknowledged) < before + 20 or len(records) < records_before + 20:
            time.sleep(0.01)
        is_done.set()
        for task in tasks:
            task.result()
    for number in acknowledged:
        assert other.get(f"w/{number}", within()) == content(number, 100_000)
    assert other.read_log(0, 1 << 30, within()) == records
    # The watch was lost with the OSD; the bell rings again, or it is known that it may have.
    for number in range(len(records), len(records) + 3):
        waiter = threading.Thread(target=other.wait_for_record, args=(number, 3600.0))
        waiter.start()
        assert store.append(number, b"more", within())
        waiter.join()


def test_without_the_monitor_an_open_store_works_on_and_none_is_opened(
    cluster: CephCluster, open_store: Open
) -> None:
    store = open_store()
    put(store, "w/1", b"before")
    cluster.kill_monitor()
    try:
        put(store, "w/2", b"without")
        assert store.get("w/1", within()) == b"before"
        assert store.append(0, b"record", within())
        with pytest.raises(LostObject):
            store.get("w/3", within())
        with pytest.raises(Unavailable, match="cannot be reached"):
            open_store(connect_timeout_s=2.0)
    finally:
        cluster.start_monitor()
        cluster.wait_for_osds(len(cluster.osds))
    assert open_store().get("w/2", within()) == b"without"


@pytest.mark.parametrize(
    ("number", "error", "said"),
    [
        (errno.ENOENT, LostObject, "no such object"),
        (errno.EIO, LostObject, "cannot read"),
        (errno.ETIMEDOUT, StoreTimeout, "in time"),
        (errno.ECANCELED, StoreTimeout, "in time"),
        (errno.EDQUOT, StorageFull, "quota"),
        (errno.ENOSPC, StorageFull, "full"),
        (errno.ESHUTDOWN, Unavailable, "blocklisted"),
        (errno.EPERM, Unavailable, "not permitted"),
    ],
)
def test_an_answer_means_an_error_of_the_contract(
    open_store: Open, number: int, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said) as caught:
        open_store()._pool.check(-number, "w/1")
    assert type(caught.value) is error


def test_a_write_that_an_osd_failed_in_is_not_a_lost_object(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    wait = WriteAnswer.wait

    def fail(answer: WriteAnswer) -> int:
        wait(answer)
        return -errno.EIO

    with monkeypatch.context() as failing:
        failing.setattr(WriteAnswer, "wait", fail)
        with pytest.raises(StoreTimeout, match="an OSD failed"):
            put(store, "w/1", b"there")
        with pytest.raises(StoreTimeout, match="may have been stored"):
            store.append(0, b"record", within())
    assert store.get("w/1", within()) == b"there"
    assert store.read_log(0, 1 << 30, within()) == [b"record"]
    with monkeypatch.context() as failing:
        failing.setattr(WriteAnswer, "wait", fail)
        with pytest.raises(StoreTimeout, match="an OSD failed"):
            store.delete(["w/1"], within())


def test_an_append_that_was_begun_is_unknown_whatever_is_told_after_it(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library sends it again where an OSD failed, and then it meets its own trace."""
    store = open_store()
    wait = WriteAnswer.wait
    log = store._log
    look = log._look_end

    def meets_itself(answer: WriteAnswer) -> int:
        wait(answer)
        monkeypatch.setattr(log, "_look_end", blocklisted)
        return -errno.ECANCELED

    def blocklisted(deadline_s: float) -> LogEnd:
        raise Unavailable("the cluster has blocklisted this client")

    assert look(within()).number == 0
    with monkeypatch.context() as failing:
        failing.setattr(WriteAnswer, "wait", meets_itself)
        with pytest.raises(StoreTimeout, match="may have been stored"):
            store.append(0, b"record", within())
    monkeypatch.setattr(log, "_look_end", look)
    assert store.read_log(0, 1 << 30, within()) == [b"record"]


def test_a_store_is_closed_while_no_osd_answers(cluster: CephCluster, open_store: Open) -> None:
    store = open_store()
    put(store, "w/1", b"there")
    with cluster.paused_osds():
        with pytest.raises(StoreTimeout):
            store.get("w/1", within(SHORT_S))
        store.close()


def test_objects_may_be_erasure_coded_and_the_log_may_not(
    cluster: CephCluster, open_store: Open
) -> None:
    cluster.tell(
        *("osd", "erasure-code-profile", "set", "k2m1", "k=2", "m=1", "crush-failure-domain=osd")
    )
    pool = cluster.create_pool("erasure", "k2m1")
    with pytest.raises(InvalidRequest, match="replicated"):
        open_store(pool)
    store = open_store(pool, log_pool=cluster.shared_pool())
    data = content("coded", 4 << 20)
    for sizes in ([4096, 8192], [1, 10_000, 100], [1 << 20] * 4, [4 << 20]):
        parts, position = [], 0
        for size_bytes in sizes:
            parts.append(memoryview(data)[position : position + size_bytes])
            position += size_bytes
        store.put("w/1", parts, within())
        assert store.get("w/1", within()) == data[:position]
        landing = bytearray(position // 3)
        reads = [ObjectRead("w/1", position // 2, memoryview(landing))]
        store.begin_reads(reads, within()).result()
        assert landing == data[position // 2 :][: len(landing)]
    assert store.append(0, b"record", within())
    store.delete(["w/1"], within())
    assert list(store.list_objects("", within())) == []
