from __future__ import annotations

import pytest

from objectcache_runtime.settings import load_settings
from objectcache_schemas.errors import NotFound
from objectcache_schemas.operators.traces import GetTraces
from objectcache_storage_server.tracing import trace_book
from objectcache_storage_server.tracing.recorder import DeliveryRecorder
from objectcache_storage_server.tracing.trace_book import TraceBook


def recorder(request_id: str, layers: int = 0) -> DeliveryRecorder:
    record = DeliveryRecorder(request_id, "bucket", "tenant", started_s=0.0, started_unix_s=0.0)
    record.accepted(
        path="agg",
        transport="tcp",
        delivery="layerwise",
        policy="equal",
        chunk_count=1,
        payload_bytes=1,
        first_layer=0,
        end_layer=layers,
        compute_window_s=None,
        window_source="none",
        rate_bytes_per_s=None,
        now_s=0.0,
    )
    return record


def filled(kept: int, request_ids: str) -> tuple[TraceBook, list[DeliveryRecorder]]:
    book, records = TraceBook(kept), [recorder(name) for name in request_ids]
    for record in records:
        book.begin(record)
    return book, records


def test_the_last_deliveries_are_kept_and_the_oldest_goes() -> None:
    book, records = filled(3, "abcd")
    assert book.latest(10) == [records[3], records[2], records[1]]
    assert book.latest(2) == [records[3], records[2]]
    assert book.find("a") == []
    assert book.find("d") == [records[3]]
    assert repr(book) == "<TraceBook 3/3 traces>"


def test_a_request_may_have_several_deliveries() -> None:
    book, records = filled(3, "aba")
    assert book.find("a") == [records[2], records[0]]
    book.begin(recorder("c"))
    assert book.find("a") == [records[2]]


def test_running_deliveries_are_shown_up_to_now() -> None:
    book, records = filled(2, "ab")
    records[0].ended(1.0, None)
    running, ended = book.answer(GetTraces(), now_s=5.0).traces
    assert (running.request_id, running.duration_s) == ("b", None)
    assert sum(phase.seconds for phase in running.phases) == 5.0
    assert (ended.request_id, ended.duration_s) == ("a", 1.0)


def test_no_trace_is_kept_where_none_is_wanted_and_all_are_exported() -> None:
    exported: list[DeliveryRecorder] = []
    record = recorder("a")
    book = TraceBook(0, exported.append)
    book.begin(record)
    record.ended(1.0, None)
    assert book.latest(10) == []
    assert exported == [record]


def test_an_unknown_request_is_told_how_many_are_kept() -> None:
    kept = load_settings(None, {}, ["scheduler.traces_kept=7"]).scheduler.traces_kept
    with pytest.raises(NotFound, match=r"'x' is kept; the last 7 .*scheduler\.traces_kept"):
        TraceBook(kept).answer(GetTraces(request_id="x"), now_s=0.0)


def test_a_reply_is_bounded_by_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_book, "LAYERS_LISTED_MAX", 10)
    book = TraceBook(10)
    for name, layers in (("a", 1), ("b", 4), ("c", 4), ("d", 4)):
        book.begin(recorder(name, layers))
    assert [trace.request_id for trace in book.answer(GetTraces(), 0.0).traces] == ["d", "c"]
    book.begin(recorder("e", 64))
    assert [trace.request_id for trace in book.answer(GetTraces(), 0.0).traces] == ["e"]
    assert book.answer(GetTraces(limit=0), 0.0).traces == ()
