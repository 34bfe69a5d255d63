"""Quotas of stored bytes and objects: never exceeded, whatever the order of puts."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from objectcache_schemas.accounts import PutUser, User
from objectcache_schemas.errors import NotFound, StorageFull
from objectcache_schemas.records import BucketConfiguration, BucketInfo, Quota
from objectcache_storage_server.accounts.account_book import AccountBook
from objectcache_storage_server.accounts.directory import AccountDirectory
from objectcache_storage_server.engines.base import BucketTotals, Engine
from objectcache_storage_server.engines.memory.engine import MemoryEngine
from objectcache_storage_server.quotas.quota_book import QuotaBook
from objectcache_storage_server.quotas.stored_ledger import Reservation, StoredLedger


class Store:
    """Buckets of alice and bob, a ledger over them, and objects by their sizes."""

    def __init__(
        self,
        user_quota: Quota = Quota(),  # noqa: B008
        clock: Callable[[], float] = time.monotonic,
        **bucket_quotas: Quota,
    ) -> None:
        self.engine: Engine = MemoryEngine()
        book = AccountBook()
        user = User(name="alice", created_s=1.0, quota=user_quota)
        book.change(PutUser(user=user, create=True), lambda user: [])
        self.directory = AccountDirectory(book)
        self.objects: dict[str, dict[str, int]] = {}
        self.quotas = QuotaBook(self.engine, book, self.directory)
        self.ledger = StoredLedger(self.quotas, self.read, clock=clock)
        self.reads = 0
        self.slow_s: list[float] | None = None  # a clock that every reading moves
        self.on_read: Callable[[], None] = lambda: None
        for name, quota in bucket_quotas.items():
            self.create(name, quota)

    def create(self, name: str, quota: Quota, owner: str = "alice") -> None:
        info = BucketInfo(name=name, owner=owner, region="", created_s=1.0)
        self.engine.create_bucket(info)
        self.ledger.bucket_created(info)
        self.engine.configure_bucket(name, BucketConfiguration(quota=quota))
        self.objects[name] = {}
        self.directory.buckets_changed()

    def totals(self, name: str) -> BucketTotals:
        if name not in self.objects:
            raise NotFound(name, code="NoSuchBucket")
        sizes = list(self.objects[name].values())
        return BucketTotals(len(sizes), sum(sizes))

    def read(self, name: str) -> BucketTotals:
        """What the ledger is told."""
        found = self.totals(name)
        self.reads += 1
        if self.slow_s is not None:
            self.slow_s[0] += 1.0
        self.on_read()
        return found

    def info(self, name: str) -> BucketInfo:
        return self.engine.bucket(name)

    def put(self, bucket: str, key: str, size_bytes: int) -> None:
        with self.ledger.reserving(self.info(bucket), 1, size_bytes):
            self.objects[bucket][key] = size_bytes


def refused(store: Store, bucket: str, size_bytes: int, object_count: int = 1) -> str:
    with (
        pytest.raises(StorageFull) as caught,
        store.ledger.reserving(store.info(bucket), object_count, size_bytes),
    ):
        pass
    assert caught.value.code == "QuotaExceeded"
    return caught.value.message


def test_a_put_up_to_the_quota_is_let_in_and_one_byte_more_is_not() -> None:
    store = Store(logs=Quota(stored_bytes=100))
    store.put("logs", "a", 60)
    assert "bucket logs may store 100 bytes, and would hold 101" in refused(store, "logs", 41)
    store.put("logs", "b", 40)
    assert refused(store, "logs", 1)
    store.put("logs", "empty", 0)


def test_objects_are_counted_apart_from_bytes() -> None:
    store = Store(logs=Quota(object_count=2))
    store.put("logs", "a", 1 << 40)
    store.put("logs", "b", 0)
    assert "2 objects, not 3" in refused(store, "logs", 0)


def test_a_users_quota_is_for_all_of_its_buckets_and_for_no_others() -> None:
    store = Store(Quota(stored_bytes=100), logs=Quota(), kv=Quota())
    store.create("bobs", Quota(), owner="bob")
    store.put("logs", "a", 60)
    store.put("bobs", "a", 1000)
    assert "user alice may store 100 bytes" in refused(store, "kv", 41)
    store.put("kv", "a", 40)


def test_a_bucket_made_later_counts() -> None:
    store = Store(Quota(stored_bytes=100), logs=Quota())
    store.put("logs", "a", 60)
    store.create("more", Quota())
    store.put("more", "a", 40)
    assert refused(store, "logs", 1)


def test_a_quota_changed_meanwhile_is_judged_at_the_commit() -> None:
    store = Store(logs=Quota(stored_bytes=100))
    with store.ledger.reserving(store.info("logs"), 1, 80) as reservation:
        store.engine.configure_bucket("logs", BucketConfiguration(quota=Quota(stored_bytes=50)))
        store.directory.buckets_changed()
        with pytest.raises(StorageFull):
            reservation.confirm(80)
        reservation.confirm(50)


def test_a_size_that_was_not_known_is_judged_at_the_commit() -> None:
    store = Store(logs=Quota(stored_bytes=100))
    with store.ledger.reserving(store.info("logs"), 1, 0) as reservation:
        with pytest.raises(StorageFull):
            reservation.confirm(101)
        reservation.confirm(100)
        assert refused(store, "logs", 1)


def test_what_failed_gives_its_room_back() -> None:
    store = Store(logs=Quota(stored_bytes=100, object_count=1))
    with pytest.raises(ZeroDivisionError), store.ledger.reserving(store.info("logs"), 1, 100):
        raise ZeroDivisionError
    assert refused(store, "logs", 101)
    store.put("logs", "a", 100)


def test_parts_of_open_uploads_count_until_their_upload_ends() -> None:
    store = Store(Quota(stored_bytes=100), logs=Quota())
    store.ledger.upload_opened(store.info("logs"), "upload")
    store.ledger.part_stored("upload", 1, 50)
    store.ledger.part_stored("upload", 2, 40)
    assert refused(store, "logs", 11)
    store.ledger.part_stored("upload", 2, 10)  # in place of the other
    store.put("logs", "a", 40)
    assert refused(store, "logs", 1)
    store.ledger.upload_ended("upload")
    store.ledger.upload_ended("upload")
    store.put("logs", "b", 60)
    store.ledger.part_stored("upload", 3, 1000)  # too late: it counts for nothing
    assert refused(store, "logs", 1)
    store.objects["logs"].clear()
    store.ledger.upload_opened(store.info("logs"), "another")
    store.ledger.part_stored("another", 1, 50)
    assert "1 uploads" in repr(store.ledger)
    store.ledger.bucket_deleted(store.info("logs"))
    assert "0 uploads" in repr(store.ledger)
    store.create("kv", Quota())
    store.put("kv", "a", 100)


def test_an_open_upload_counts_as_the_object_that_it_will_be() -> None:
    store = Store(logs=Quota(object_count=2))
    store.ledger.upload_opened(store.info("logs"), "first")
    store.ledger.upload_opened(store.info("logs"), "second")
    assert "2 objects, not 3" in refused(store, "logs", 0)
    store.objects["logs"]["joined"] = 10
    store.ledger.upload_ended("first", is_joined=True)
    assert refused(store, "logs", 0)
    store.ledger.upload_ended("second")
    store.put("logs", "a", 0)
    assert refused(store, "logs", 0)


def test_a_put_that_fits_by_what_is_known_reads_no_counter() -> None:
    store = Store(Quota(stored_bytes=1000), logs=Quota(stored_bytes=500), kv=Quota())
    reservation = store.ledger.empty(store.info("logs"))
    assert not reservation.confirm_known(1)  # nothing is counted yet
    for index in range(300):
        store.create(f"other-{index}", Quota())
    store.put("logs", "a", 100)
    counted = store.reads
    for index in range(5):
        store.put("logs", "a", 10 + index)
        store.put("kv", "b", 10)
    assert reservation.confirm_known(1)
    assert store.reads == counted
    assert not reservation.confirm_known(401)  # what it replaced still counts, so one has to look
    reservation.confirm(401)
    store.ledger.release(reservation)
    assert store.reads <= counted + 2


def test_what_goes_by_itself_makes_room_and_what_is_deleted_does_so_at_once() -> None:
    now_s = [0.0]
    store = Store(Quota(stored_bytes=100), clock=lambda: now_s[0], logs=Quota(), kv=Quota())
    store.put("logs", "a", 60)
    store.put("logs", "b", 40)
    del store.objects["logs"]["a"]  # evicted: nobody says so
    store.put("kv", "a", 60)
    now_s[0] += 1.0
    store.slow_s = now_s
    assert refused(store, "kv", 1)  # a recount that takes its time
    del store.objects["logs"]["b"]
    assert refused(store, "kv", 1)  # so there is no other for a while
    store.ledger.shrunk("logs")
    store.put("kv", "b", 40)


def test_a_bucket_made_again_while_a_put_goes_on_holds_what_the_put_stores() -> None:
    store = Store(Quota(stored_bytes=100), logs=Quota(), kv=Quota())
    info = store.info("logs")
    with store.ledger.reserving(info, 1, 60):
        store.ledger.bucket_deleted(info)
        store.ledger.bucket_created(info)
        store.objects["logs"]["a"] = 60
    assert refused(store, "kv", 41)
    store.put("kv", "a", 40)


def test_a_reading_that_a_commit_overtakes_is_not_believed() -> None:
    store = Store(Quota(stored_bytes=100), logs=Quota(), kv=Quota())
    put = store.ledger.empty(store.info("logs"))
    put.object_count = 1
    put.confirm(60)

    def overtake() -> None:
        store.on_read = lambda: None
        store.objects["logs"]["a"] = 60
        store.ledger.release(put)

    store.on_read = overtake  # after the counter was read, before that is noted
    assert refused(store, "logs", 41)
    assert refused(store, "kv", 41)
    store.put("kv", "a", 40)


def test_without_a_quota_no_counter_is_read_once_that_is_known() -> None:
    store = Store(logs=Quota())
    reservation = store.ledger.empty(store.info("logs"))
    assert not reservation.confirm_known(1)
    store.put("logs", "a", 1)
    assert reservation.confirm_known(1)
    store.directory.buckets_changed()
    assert not reservation.confirm_known(1)
    assert store.reads == 1


def test_puts_in_many_threads_never_exceed_the_quota() -> None:
    store = Store(Quota(stored_bytes=1000), lambda: 0.0, logs=Quota(object_count=70), kv=Quota())
    seen: list[int] = []

    def run(thread: int) -> None:
        for index in range(50):
            bucket = ("logs", "kv")[index % 2]
            try:
                store.put(bucket, f"{thread}-{index}", 7)
            except StorageFull:
                continue
            seen.append(sum(store.totals(name).stored_bytes for name in ("logs", "kv")))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(seen) <= 1000
    with contextlib.suppress(StorageFull):  # what was refused beside others may have room now
        for number in itertools.count():
            store.put("kv", f"after-{number}", 7)
    assert 990 < store.totals("logs").stored_bytes + store.totals("kv").stored_bytes <= 1000
    assert store.totals("logs").object_count <= 70


SIZES = st.integers(0, 40)


class PutsInAnyOrder(RuleBasedStateMachine):
    """Puts begin, commit, abort and overwrite in any order; deletes and uploads come between."""

    puts = Bundle("puts")

    def __init__(self) -> None:
        super().__init__()
        self.store = Store(
            Quota(stored_bytes=100, object_count=6),
            logs=Quota(stored_bytes=70),
            kv=Quota(object_count=4),
        )
        self.part_bytes: dict[int, int] = {}
        self.is_open = False

    @rule(target=puts, bucket=st.sampled_from(["logs", "kv"]), key=st.integers(0, 3), size=SIZES)
    def begin(self, bucket: str, key: int, size: int) -> tuple[Reservation, str, str, int] | None:
        reservation = self.store.ledger.empty(self.store.info(bucket))
        reservation.object_count = 1
        try:
            reservation.confirm(size)
        except StorageFull:
            self.store.ledger.release(reservation)
            return None
        return reservation, bucket, str(key), size

    @rule(put=consumes(puts))
    def commit(self, put: tuple[Reservation, str, str, int] | None) -> None:
        if put is not None:
            reservation, bucket, key, size = put
            self.store.objects[bucket][key] = size
            self.store.ledger.release(reservation)

    @rule(put=consumes(puts))
    def abort(self, put: tuple[Reservation, str, str, int] | None) -> None:
        if put is not None:
            self.store.ledger.release(put[0])

    @rule(bucket=st.sampled_from(["logs", "kv"]), key=st.integers(0, 3))
    def delete(self, bucket: str, key: int) -> None:
        self.store.objects[bucket].pop(str(key), None)

    @rule(number=st.integers(1, 3), size=SIZES)
    def store_part(self, number: int, size: int) -> None:
        try:
            with self.store.ledger.reserving(self.store.info("logs"), 0, size):
                if self.is_open:
                    self.part_bytes[number] = size
                self.store.ledger.part_stored("upload", number, size)
        except StorageFull:
            pass

    @rule()
    def open_upload(self) -> None:
        try:
            with self.store.ledger.reserving(self.store.info("logs"), 1, 0) as reservation:
                self.store.ledger.upload_opened(self.store.info("logs"), "upload")
                self.store.ledger.not_stored(reservation)
                self.is_open = True
        except StorageFull:
            pass

    @rule(is_joined=st.booleans())
    def end_upload(self, is_joined: bool) -> None:
        if self.is_open and is_joined:
            self.store.objects["logs"]["joined"] = sum(self.part_bytes.values())
        self.store.ledger.upload_ended("upload", is_joined=is_joined)
        self.part_bytes.clear()
        self.is_open = False

    @rule(bucket=st.sampled_from(["logs", "kv"]))
    def nothing_is_lost_of_what_is_counted(self, bucket: str) -> None:
        self.store.ledger.shrunk(bucket)

    @invariant()
    def no_quota_is_exceeded(self) -> None:
        logs, kv = self.store.totals("logs"), self.store.totals("kv")
        parts = sum(self.part_bytes.values())
        assert logs.stored_bytes + parts <= 70
        assert kv.object_count <= 4
        assert logs.stored_bytes + kv.stored_bytes + parts <= 100
        assert logs.object_count + kv.object_count + self.is_open <= 6


TestPutsInAnyOrder = PutsInAnyOrder.TestCase


@given(st.lists(SIZES, max_size=12))
def test_what_is_let_in_alone_is_exactly_what_fits(sizes: list[int]) -> None:
    store = Store(logs=Quota(stored_bytes=100))
    stored = 0
    for index, size in enumerate(sizes):
        try:
            store.put("logs", str(index), size)
            stored += size
        except StorageFull:
            assert stored + size > 100
        assert stored <= 100
