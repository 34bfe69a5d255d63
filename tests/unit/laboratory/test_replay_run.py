"""Replaying against a store in memory: hits, bytes, times, errors."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import pytest

from objectcache_laboratory.replay.kv_bytes import Bytes
from objectcache_laboratory.replay.report import report_table, spread, summarise
from objectcache_laboratory.replay.run import Replay, RequestOutcome, due_after_s, replay_all
from objectcache_laboratory.replay.trace import TraceRequest
from objectcache_laboratory.replay.workload import first_askers, replay_layout
from objectcache_schemas.errors import Busy

LAYOUT = replay_layout(0.001, 4, 512, seed=0)


class MemoryDelivery:
    def __init__(self, chunks: Bytes) -> None:
        self._chunks = chunks
        self.arrivals_s: list[float | None] = [None] * chunks.shape[1]

    def wait_layer(self, layer: int) -> Bytes:
        self.arrivals_s[layer] = 0.01 * (layer + 1)
        return self._chunks[:, layer]


class MemoryBucket:
    """A store in a dict; `damage` flips a byte of what it delivers, `fail_puts` refuses puts."""

    def __init__(self, damage: bool = False, fail_puts: bool = False) -> None:
        self.chunks: dict[str, Bytes] = {}
        self.damage = damage
        self.fail_puts = fail_puts
        self.put_counts: list[int] = []

    def match(self, keys: Sequence[str]) -> int:
        return next((n for n, key in enumerate(keys) if key not in self.chunks), len(keys))

    def fetch(
        self, keys: Sequence[str], *, delivery: str
    ) -> AbstractContextManager[MemoryDelivery]:
        assert delivery == "layerwise"
        chunks = np.stack([self.chunks[key] for key in keys])
        if self.damage:
            chunks[-1, -1, -1] ^= 1
        return nullcontext(MemoryDelivery(chunks))

    def put(self, keys: Sequence[str], chunks: Bytes, *, parent_key: str | None) -> None:
        assert parent_key is None or parent_key in self.chunks
        if self.fail_puts:
            raise Busy("too many puts")
        self.put_counts.append(len(keys))
        self.chunks.update(zip(keys, chunks, strict=True))


def request(*hash_ids: int, timestamp: float = 0) -> TraceRequest:
    return TraceRequest(timestamp, 512 * len(hash_ids) - 100, 1, hash_ids)


REQUESTS = [request(1, 2, 3), request(1, 2, 4), request(1, 2, 3), request(5)]


def test_hits_are_fetched_and_the_rest_is_put() -> None:
    bucket = MemoryBucket()
    outcomes = replay_all(Replay(bucket, LAYOUT), REQUESTS, concurrency=1, speed=0)
    assert [outcome.matched_blocks for outcome in outcomes] == [0, 2, 3, 0]
    assert [outcome.matched_blocks for outcome in outcomes] == list(
        map(len, first_askers(REQUESTS))
    )
    assert summarise(outcomes, first_askers(REQUESTS), elapsed_s=1.0).untimely_blocks == 0
    assert [outcome.matched_tokens for outcome in outcomes] == [0, 1024, 3 * 512 - 100, 0]
    assert bucket.put_counts == [3, 1, 1]
    assert outcomes[2].fetched_bytes == 3 * LAYOUT.chunk_bytes
    assert outcomes[2].put_s is None
    assert outcomes[2].first_layer_s == 0.01
    assert outcomes[2].last_layer_s == 0.04


def test_concurrent_requests_keep_the_order_of_their_outcomes() -> None:
    requests = [request(n, *range(100, 100 + n % 5)) for n in range(40)]
    outcomes = replay_all(Replay(MemoryBucket(), LAYOUT), requests, concurrency=8, speed=0)
    assert [outcome.block_count for outcome in outcomes] == [len(r.hash_ids) for r in requests]


def test_a_block_that_was_asked_for_before_it_was_put_is_told_apart_from_one_that_was_lost() -> (
    None
):
    askers = first_askers([request(1, 2), request(1, 2, 3), request(1, 2, 4)])
    first = RequestOutcome(2, 924, begun_s=1.0, ended_s=5.0)
    at_once = RequestOutcome(3, 1436, matched_blocks=1, begun_s=4.0, ended_s=6.0)
    after = RequestOutcome(3, 1436, matched_blocks=1, begun_s=5.5, ended_s=7.0)
    report = summarise([first, at_once, after], askers, elapsed_s=6.0)
    assert (report.matched_blocks, report.expected_blocks, report.untimely_blocks) == (2, 4, 1)
    rows = dict(zip(*(column.cells for column in report_table(report).columns), strict=True))
    assert rows["  missed, being put just then"] == "1; --concurrency 1 waits"


def test_a_byte_that_was_delivered_wrong_is_found_and_fails_the_replay() -> None:
    outcomes = replay_all(Replay(MemoryBucket(damage=True), LAYOUT), REQUESTS, 1, speed=0)
    report = summarise(outcomes, first_askers(REQUESTS), elapsed_s=1.0)
    assert report.wrong_bytes == 2
    assert report.failed


def test_an_error_of_the_store_is_counted_and_the_replay_goes_on() -> None:
    outcomes = replay_all(Replay(MemoryBucket(fail_puts=True), LAYOUT), REQUESTS, 1, speed=0)
    report = summarise(outcomes, first_askers(REQUESTS), elapsed_s=1.0)
    assert report.errors == {"SlowDown": 4}
    assert report.error_messages == {"SlowDown": "too many puts"}
    assert report.failed


def test_a_long_miss_is_put_in_pieces_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("objectcache_laboratory.replay.run.PUT_BYTES_MAX", 2 * LAYOUT.chunk_bytes)
    bucket = MemoryBucket()
    outcome = Replay(bucket, LAYOUT).request(request(*range(5)))
    assert bucket.put_counts == [2, 2, 1]
    assert outcome.put_bytes == 5 * LAYOUT.chunk_bytes


def test_a_request_is_due_at_its_place_in_the_trace_divided_by_the_speed() -> None:
    first, later = request(1, timestamp=1000), request(1, timestamp=31_000)
    assert due_after_s(later, first, speed=10) == 3.0
    assert due_after_s(later, first, speed=0.5) == 60.0
    assert due_after_s(later, first, speed=0) == 0.0


def test_a_paced_replay_takes_as_long_as_the_trace_says() -> None:
    requests = [request(1), request(1, timestamp=50)]
    begun_s = time.monotonic()
    outcomes = replay_all(Replay(MemoryBucket(), LAYOUT), requests, concurrency=1, speed=1)
    assert outcomes[1].matched_blocks == 1
    assert outcomes[1].begun_s - begun_s > 0.049  # less what a timer may round off
    assert all(outcome.late_s < 60 for outcome in outcomes)


def test_percentiles_are_of_the_times_that_happened() -> None:
    times = spread([None, *[float(n) for n in range(1, 101)]])
    assert (times.count, times.p50_s, times.max_s) == (100, 50.5, 100.0)
    assert times.p99_s == pytest.approx(99.01)
    assert spread([None]).p50_s is None


def test_a_report_of_nothing_but_errors_is_still_a_table() -> None:
    report = summarise([RequestOutcome(3, 1500, error=Busy("full"))], [[]], elapsed_s=0.0)
    assert report_table(report).row_count > 10
