"""A store in S3 behind a proxy that misbehaves, in front of a real server."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import ClientSession, TCPConnector, web

from objectcache_schemas.errors import InvalidRequest, StorageFull, Unavailable
from objectcache_storage_server.engines.stores.s3.s3_log import S3Log
from objectcache_storage_server.engines.stores.s3.s3_objects import S3Objects
from objectcache_storage_server.engines.stores.s3.s3_settings import S3Settings
from objectcache_storage_server.engines.stores.s3.s3_store import S3Store
from objectcache_storage_server.engines.stores.shared_store import (
    LostObject,
    ObjectRead,
    StoreTimeout,
)
from tests.contract.engine_suite import content
from tests.contract.stores.shared_stores import settings_of_bucket
from tests.contract.stores.test_shared_stores import put, read, soon
from tests.seaweedfs import S3Server

ALL = 1 << 30


class MisbehavingProxy:
    """Passes requests on to `endpoint`, and does to them what a test asks for.

    `answers` are given to requests whose method is its key, one each, before any is passed on:
    a status, "lost" (carried out, but the connection breaks), "truncated" (half of the body),
    or "silent" (no answer at all). With `ignores_conditions` what its
    condition forbids is answered as if it had been done.
    """

    def __init__(self, endpoint: str) -> None:
        self.answers: dict[str, list[int | str]] = {}
        self.ignores_conditions = False
        self.error_code = "InternalError"
        self.requests: Counter[str] = Counter()
        self._upstream = endpoint
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()
        self._ready.wait()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set_result, None)
        self._thread.join()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._ended: asyncio.Future[None] = self._loop.create_future()
        application = web.Application(client_max_size=1 << 30)
        application.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with ClientSession(
            connector=TCPConnector(force_close=True), auto_decompress=False
        ) as self._session:
            self._ready.set()
            await self._ended
        await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.requests[request.method] += 1
        planned = self.answers.get(request.method)
        answer = planned.pop(0) if planned else None
        body = await request.read()
        if isinstance(answer, int):
            text = f"<Error><Code>{self.error_code}</Code></Error>"
            return web.Response(status=answer, text=text, content_type="application/xml")
        if answer == "silent":
            await asyncio.sleep(3600)
        async with self._session.request(
            request.method, self._upstream + request.raw_path, headers=request.headers, data=body
        ) as passed:
            data = await passed.read()
            kept = {
                name: value
                for name, value in passed.headers.items()
                if name.lower() not in {"transfer-encoding", "connection", "date", "server"}
            }
            if passed.status == 412 and self.ignores_conditions:
                return web.Response(headers={"ETag": '"overwritten"'})
            if answer is None:
                return web.Response(status=passed.status, headers=kept, body=data)
        assert request.transport is not None
        if answer == "truncated":
            response = web.StreamResponse(status=passed.status, headers=kept)
            await response.prepare(request)
            await response.write(data[: len(data) // 2])
        request.transport.close()
        return web.Response()


@pytest.fixture
def proxy(seaweedfs: S3Server) -> Iterator[MisbehavingProxy]:
    opened = MisbehavingProxy(seaweedfs.endpoint)
    yield opened
    opened.close()


@pytest.fixture
def settings(seaweedfs: S3Server, proxy: MisbehavingProxy) -> Iterator[S3Settings]:
    with settings_of_bucket(seaweedfs) as (found, _):
        yield replace(found, endpoint=proxy.endpoint)


@pytest.fixture
def store(settings: S3Settings) -> Iterator[S3Store]:
    opened = S3Store(settings, create=True)
    yield opened
    opened.close()


@pytest.mark.parametrize("answer", [500, 503, 429, "lost", "truncated"])
def test_what_goes_wrong_for_a_while_is_asked_for_again(
    store: S3Store, proxy: MisbehavingProxy, answer: int | str
) -> None:
    data = content("object", 1 << 20)
    proxy.answers["PUT"] = [answer, answer]
    put(store, "w/1", data)
    proxy.answers["GET"] = [answer, answer]
    assert read(store, "w/1", 1000, 500_000) == data[1000:501_000]
    proxy.answers["GET"] = [answer]
    assert store.get("w/1", soon()) == data
    proxy.answers["GET"] = [answer]
    assert [stored.name for stored in store.list_objects("", soon())] == ["w/1"]
    proxy.answers["POST"] = [answer]
    store.delete(["w/1"], soon())
    assert list(store.list_objects("", soon())) == []


@pytest.mark.parametrize("answer", [500, 503, "lost", "truncated", "silent"])
def test_what_goes_wrong_until_the_deadline_is_a_timeout_and_nothing_is_lost(
    store: S3Store, proxy: MisbehavingProxy, answer: int | str
) -> None:
    put(store, "w/1", b"there")
    proxy.answers = {"GET": [answer] * 100, "HEAD": [answer] * 100}
    landing = bytearray(5)
    reads = [ObjectRead("w/1", 0, memoryview(landing))]
    for call in (
        store.begin_reads(reads, time.monotonic() + 0.3).result,
        lambda: store.get("w/1", time.monotonic() + 0.3),
        lambda: store.log_end(0, time.monotonic() + 0.3),
        lambda: list(store.list_objects("", time.monotonic() + 0.3)),
    ):
        with pytest.raises(StoreTimeout):
            call()
    assert landing == bytes(5)
    proxy.answers.clear()
    assert store.get("w/1", soon()) == b"there"


def test_an_append_whose_answer_was_lost_is_recognised(
    store: S3Store, settings: S3Settings, proxy: MisbehavingProxy
) -> None:
    assert store.append(0, b"first", soon())
    proxy.answers["PUT"] = ["lost"]
    assert store.append(1, b"mine", soon())
    proxy.answers["PUT"] = [500]
    assert not store.append(1, b"mine", soon())
    assert store.read_log(0, ALL, soon()) == [b"first", b"mine"]


def test_an_append_that_is_not_answered_is_a_timeout_and_may_have_been_carried_out(
    store: S3Store, proxy: MisbehavingProxy
) -> None:
    assert store.append(0, b"first", soon())
    proxy.answers["PUT"] = ["lost"] + [503] * 100
    with pytest.raises(StoreTimeout):
        store.append(1, b"mine", time.monotonic() + 3.0)  # time for the first to be carried out
    proxy.answers.clear()
    assert store.read_log(1, ALL, soon()) == [b"mine"]
    assert not store.append(1, b"mine", soon())


@pytest.mark.parametrize(
    ("status", "code"), [(507, "StorageFull"), (403, "QuotaExceeded"), (400, "InvalidRequest")]
)
def test_a_refusal_after_an_attempt_without_an_answer_does_not_say_that_it_was_not_carried_out(
    store: S3Store, proxy: MisbehavingProxy, status: int, code: str
) -> None:
    proxy.error_code = code
    proxy.answers["PUT"] = ["lost", status]
    with pytest.raises(StoreTimeout):
        put(store, "w/1", b"data")
    proxy.answers["PUT"] = ["lost", status]
    with pytest.raises(StoreTimeout):
        store.append(0, b"mine", soon())
    assert store.read_log(0, ALL, soon()) == [b"mine"]
    assert not store.append(0, b"mine", soon())


def test_an_append_whose_token_cannot_be_read_may_have_been_carried_out(
    store: S3Store, proxy: MisbehavingProxy
) -> None:
    assert store.append(0, b"first", soon())
    assert store.log_end(0, soon()) == 1
    proxy.answers = {"PUT": ["lost"], "GET": [400]}
    with pytest.raises(StoreTimeout, match="may have been stored"):
        store.append(1, b"mine", soon())
    assert store.read_log(1, ALL, soon()) == [b"mine"]


def test_a_404_of_the_key_is_lost_only_where_the_store_is_seen_to_be_there(
    store: S3Store, proxy: MisbehavingProxy
) -> None:
    put(store, "w/1", b"there")
    with pytest.raises(LostObject):
        store.get("w/2", soon())
    proxy.answers["GET"] = [404, 404]  # as a gateway that has lost its buckets
    with pytest.raises(Unavailable, match="there is no store"):
        store.get("w/1", soon())
    assert store.get("w/1", soon()) == b"there"


def test_an_object_is_not_lost_because_an_answer_was_short(
    store: S3Store, proxy: MisbehavingProxy
) -> None:
    put(store, "w/1", b"there")
    proxy.answers["GET"] = [416]
    assert read(store, "w/1", 0, 5) == b"there"
    with pytest.raises(LostObject, match="ends at byte 5"):
        read(store, "w/1", 3, 5)


@pytest.mark.parametrize(("status", "code"), [(403, "QuotaExceeded"), (507, "StorageFull")])
def test_a_full_server_says_so(
    store: S3Store, proxy: MisbehavingProxy, status: int, code: str
) -> None:
    proxy.error_code = code
    proxy.answers["PUT"] = [status]
    with pytest.raises(StorageFull, match=code):
        put(store, "w/1", b"data")


@pytest.mark.parametrize(("status", "code"), [(403, "QuotaExceeded"), (507, "StorageFull")])
def test_reads_and_deletes_of_a_full_server_are_asked_for_again(
    store: S3Store, proxy: MisbehavingProxy, status: int, code: str
) -> None:
    put(store, "w/1", b"there")
    proxy.error_code = code
    proxy.answers = {"GET": [status], "POST": [status]}
    assert read(store, "w/1", 0, 5) == b"there"
    proxy.answers["GET"] = [507] * 100
    landing = bytearray(5)
    reads = [ObjectRead("w/1", 0, memoryview(landing))]
    with pytest.raises(StoreTimeout):
        store.begin_reads(reads, time.monotonic() + 0.3).result(30)
    proxy.answers["GET"] = [status]
    store.delete(["w/1"], soon())
    proxy.answers.clear()
    assert list(store.list_objects("", soon())) == []


@pytest.mark.parametrize("error", [RuntimeError("of the library"), None])
def test_a_read_ends_whatever_its_library_does(
    store: S3Store, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """It raises what nobody has named, or keeps the deadline from the loop's timers."""

    async def fail(*_: object) -> memoryview:
        if error is not None:
            raise error
        await asyncio.sleep(3600)
        return memoryview(b"")

    monkeypatch.setattr(store._objects, "get_range", fail)
    reads = [ObjectRead("w/1", 0, memoryview(bytearray(5)))]
    deadline_s = soon() if error is not None else time.monotonic() + 1.0
    future = store.begin_reads(reads, deadline_s)
    with pytest.raises(StoreTimeout if error is None else RuntimeError):
        future.result(30)


def test_a_server_that_ignores_the_condition_is_refused(
    settings: S3Settings, proxy: MisbehavingProxy
) -> None:
    proxy.ignores_conditions = True
    with pytest.raises(InvalidRequest, match="ignores If-None-Match"):
        S3Store(settings, create=True)


def test_a_server_that_does_not_know_the_condition_is_refused(
    settings: S3Settings, proxy: MisbehavingProxy
) -> None:
    proxy.error_code = "NotImplemented"
    proxy.answers["PUT"] = [501]
    with pytest.raises(Unavailable, match="501 NotImplemented"):
        S3Store(settings, create=True)


def test_a_wrong_key_is_told_and_no_secret_is_logged(
    settings: S3Settings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = replace(settings, secret_access_key="not-the-secret")
    with pytest.raises(Unavailable, match=r"403 SignatureDoesNotMatch.*AWS_SECRET") as caught:
        S3Store(wrong, create=True)
    assert str(caught.value).startswith(f"{wrong.where()}: put an object: ")
    assert "not-the-secret" not in caplog.text + str(caught.value) + repr(wrong)


def test_a_bucket_without_a_store_is_not_taken_for_an_empty_one(settings: S3Settings) -> None:
    with pytest.raises(Unavailable, match="there is no store"):
        S3Store(settings)
    with pytest.raises(Unavailable, match=r"no (store|bucket)"):
        S3Store(replace(settings, bucket="not-there"), create=True)
    for is_first in (True, False):
        opened = S3Store(settings, create=True)
        assert opened.was_made == is_first
        opened.close()
    S3Store(settings).close()


def test_a_process_that_was_forked_is_told_and_does_not_hang(store: S3Store) -> None:
    put(store, "w/1", b"there")
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        try:
            store.get("w/1", soon())
        except Unavailable as error:
            os.write(write_end, str(error).encode())
        os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as told:
        assert b"was forked" in told.read()
    os.waitpid(child, 0)
    assert store.get("w/1", soon()) == b"there"


# --- the record before ---


def test_a_lost_record_is_followed_by_none_and_looking_costs_a_follower_nothing(
    settings: S3Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, fresh = S3Store(settings, create=True), S3Store(settings)
    looked: list[str] = []
    size_bytes = S3Objects.size_bytes

    async def look(objects: S3Objects, name: str, deadline_s: float) -> int:
        looked.append(name)
        return await size_bytes(objects, name, deadline_s)

    monkeypatch.setattr(S3Objects, "size_bytes", look)
    for number in range(3):
        assert one.append(number, b"record", soon())
    assert fresh.append(3, b"record", soon())
    assert looked == [f"log/{2:020d}"]
    assert one.read_log(3, 1, soon()) == [b"record"]
    assert one.append(4, b"record", soon())
    assert fresh.log_end(4, soon()) == 5
    fresh._calls.begin(fresh._objects.delete([f"log/{4:020d}"], soon())).result()
    last = S3Store(settings)
    with pytest.raises(Unavailable, match="no record 4 for 5 to follow"):
        last.append(5, b"hole", soon())
    assert last.append(4, b"again", soon())
    assert fresh.append(5, b"record", soon())
    assert looked == [f"log/{number:020d}" for number in (2, 4, 3)]
    for store in (one, fresh, last):
        store.close()


# --- how long what was trimmed stays ---


def test_trimmed_records_stay_for_those_who_looked_before(settings: S3Settings) -> None:
    stale, other = S3Store(settings, create=True), S3Store(settings)
    for number in range(6):
        assert other.append(number, b"record", soon())
    stale.log_end(0, soon())
    other.trim_log(4, soon())
    assert not stale.append(3, b"stale", soon())  # it is there still
    assert other.read_log(4, ALL, soon()) == [b"record"] * 2
    for store in (stale, other):
        store.close()


def record_count(store: S3Store) -> int:
    """Records that are in the bucket, trimmed or not."""

    async def count() -> int:
        return len([name async for name in store._objects.names("log/", "", soon())])

    return store._calls.begin(count()).result()


def test_a_pause_that_only_the_wall_clock_saw_is_one(settings: S3Settings) -> None:
    """As of a virtual machine whose boot time saw nothing of what its hypervisor did."""
    now_s, wall_s = [1000.0], [5000.0]
    stale, other = (S3Store(settings, create=True) for _ in range(2))
    stale._log = S3Log(stale._objects, 600.0, lambda: 1000.0, lambda: wall_s[0])
    other._log = S3Log(other._objects, 600.0, lambda: now_s[0])
    for number in range(6):
        assert other.append(number, b"record", soon())
    assert stale.log_end(0, soon()) == 6
    other.trim_log(4, soon())
    now_s[0] += 600
    other.trim_log(4, soon())
    assert record_count(other) == 2
    wall_s[0] += 600
    assert not stale.append(3, b"stale", soon())
    stale.trim_log(5, soon())
    wall_s[0] += 6000
    stale.trim_log(5, soon())  # a wall clock that runs ahead deletes nothing early
    assert record_count(other) == 2
    for store in (stale, other):
        store.close()


def test_after_that_time_they_are_deleted_and_whoever_looked_before_looks_again(
    settings: S3Settings,
) -> None:
    now_s = [1000.0]
    stores = [S3Store(settings, create=True) for _ in range(2)]
    for store in stores:
        store._log = S3Log(store._objects, kept_s=600.0, clock=lambda: now_s[0])
    stale, other = stores
    for number in range(6):
        assert other.append(number, b"record", soon())
    assert stale.log_end(0, soon()) == 6
    other.trim_log(4, soon())
    now_s[0] += 599
    other.trim_log(4, soon())
    assert record_count(other) == 6
    now_s[0] += 1
    other.trim_log(5, soon())
    assert record_count(other) == 2  # below the floor that is old enough
    assert not stale.append(3, b"stale", soon())
    assert stale.read_log(5, ALL, soon()) == [b"record"]
    assert stale.log_end(0, soon()) == 6
    for store in stores:
        store.close()


def test_an_append_that_was_on_its_way_for_longer_is_not_acknowledged_if_its_number_was_trimmed(
    settings: S3Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another call of the same server has looked at the floors meanwhile."""
    now_s = [1000.0]
    stale, other = (S3Store(settings, create=True) for _ in range(2))
    for store in (stale, other):
        store._log = S3Log(store._objects, kept_s=600.0, clock=lambda: now_s[0])
    assert other.append(0, b"record", soon())
    assert stale.log_end(0, soon()) == 1
    put_object = stale._objects.put

    async def stand_still(*args: Any, **kwargs: Any) -> None:
        def meanwhile() -> None:
            for number in range(1, 4):
                assert other.append(number, b"record", soon())
            other.trim_log(3, soon())
            now_s[0] += 601
            other.trim_log(3, soon())
            assert stale.log_end(0, soon()) == 4

        await asyncio.get_running_loop().run_in_executor(None, meanwhile)
        await put_object(*args, **kwargs)

    monkeypatch.setattr(stale._objects, "put", stand_still)
    with pytest.raises(StoreTimeout, match="another's"):
        stale.append(1, b"stale", soon())
    for store in (stale, other):
        assert store.log_end(0, soon()) == 4
        assert store.read_log(3, ALL, soon()) == [b"record"]
        store.close()
