"""What a gateway counts of requests: the numbers of series add up, not multiply."""

from __future__ import annotations

from objectcache_gateway.metrics.request_counts import NO_OPERATION, NO_TENANT, RequestCounts
from objectcache_gateway.request.routes import Operation
from objectcache_runtime.metrics.metric_cells import OTHER


def ended(
    counts: RequestCounts,
    operation: Operation | None = Operation.GET_OBJECT,
    identity: str | None = "alice",
    status: int | str = 200,
    error_code: str = "",
    first_byte_s: float | None = 0.001,
) -> None:
    counts.ended(operation, identity, status, error_code, first_byte_s, 0.002, 10, 100)


def test_requests_are_counted_by_operation_and_by_tenant_apart() -> None:
    counts = RequestCounts(10)
    ended(counts)
    ended(counts, status=404, error_code="NoSuchKey")
    ended(counts, Operation.PUT_OBJECT, "bob")
    assert dict(counts.operations["GetObject"].statuses) == {200: 1, 404: 1}
    assert dict(counts.tenants["bob"].statuses) == {200: 1}
    assert counts.operations["GetObject"].sent_bytes == 200
    assert counts.tenants["alice"].received_bytes == 20
    assert dict(counts.errors) == {"NoSuchKey": 1}


def test_a_request_without_an_answer_has_no_time_to_first_byte() -> None:
    counts = RequestCounts(10)
    ended(counts, status="aborted", first_byte_s=None)
    cell = counts.operations["GetObject"]
    assert (cell.duration.count, cell.first_byte.count) == (1, 0)
    assert dict(cell.statuses) == {"aborted": 1}


def test_tenants_over_the_bound_share_a_name_and_nobody_takes_none() -> None:
    counts = RequestCounts(2)  # admin.tenants_in_metrics_max
    for identity in (None, "a", "b", "c", "d", None, "a"):
        ended(counts, identity=identity)
    totals = {name: sum(cell.statuses.values()) for name, cell in counts.tenants.items()}
    assert totals == {NO_TENANT: 2, "a": 2, "b": 1, OTHER: 2}


def test_an_authentication_failure_is_one_only_where_nobody_was_established() -> None:
    counts = RequestCounts(10)
    ended(counts, None, None, 403, "SignatureDoesNotMatch")
    ended(counts, identity="alice", status=403, error_code="AccessDenied")
    ended(counts, None, None, 400, "InvalidRequest")
    assert dict(counts.authentication_failures) == {"SignatureDoesNotMatch": 1}
    assert sum(counts.errors.values()) == 3
    assert dict(counts.operations[NO_OPERATION].statuses) == {403: 1, 400: 1}


def test_a_match_counts_chunks_always_and_tokens_where_the_layout_says_how_many() -> None:
    counts = RequestCounts(10)
    counts.matched("alice", 10, 7, 16)
    counts.matched("alice", 4, 0, 0)
    cell = counts.tenants["alice"]
    assert (cell.matched_chunks, cell.missed_chunks) == (7, 7)
    assert (cell.matched_tokens, cell.missed_tokens) == (7 * 16, 3 * 16)
