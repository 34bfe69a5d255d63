from __future__ import annotations

from email.utils import formatdate

import pytest

from objectcache_gateway.request.conditions import (
    ConditionOutcome,
    check_copy_source,
    evaluate_read,
    range_applies,
    write_condition,
)
from objectcache_schemas.errors import InvalidRequest, PreconditionFailed, Unsupported
from objectcache_schemas.records import Condition
from tests.unit.gateway.request_signing import make_head

ETAG = "d41d8cd98f00b204e9800998ecf8427e-2"
MODIFIED_S = 1_700_000_000.75
BEFORE = formatdate(MODIFIED_S - 10, usegmt=True)
SAME = formatdate(int(MODIFIED_S), usegmt=True)
AFTER = formatdate(MODIFIED_S + 10, usegmt=True)

PROCEED, NOT_MODIFIED, FAILED = (
    ConditionOutcome.PROCEED,
    ConditionOutcome.NOT_MODIFIED,
    ConditionOutcome.FAILED,
)

CASES = [
    ({}, PROCEED),
    ({"if-match": f'"{ETAG}"'}, PROCEED),
    ({"if-match": ETAG}, PROCEED),
    ({"if-match": "*"}, PROCEED),
    ({"if-match": f'"a", b , "{ETAG}"'}, PROCEED),
    ({"if-match": f'W/"{ETAG}"'}, FAILED),
    ({"if-match": '"other"'}, FAILED),
    ({"if-match": ETAG[:-2]}, FAILED),
    ({"if-match": ""}, FAILED),
    ({"if-none-match": f'"{ETAG}"'}, NOT_MODIFIED),
    ({"if-none-match": f"a,{ETAG}"}, NOT_MODIFIED),
    ({"if-none-match": f'W/"{ETAG}"'}, NOT_MODIFIED),
    ({"if-none-match": "*"}, NOT_MODIFIED),
    ({"if-none-match": '"other"'}, PROCEED),
    ({"if-modified-since": BEFORE}, PROCEED),
    ({"if-modified-since": SAME}, NOT_MODIFIED),
    ({"if-modified-since": AFTER}, NOT_MODIFIED),
    ({"if-unmodified-since": BEFORE}, FAILED),
    ({"if-unmodified-since": SAME}, PROCEED),
    ({"if-unmodified-since": AFTER}, PROCEED),
    # The ETag outranks the date.
    ({"if-match": ETAG, "if-unmodified-since": BEFORE}, PROCEED),
    ({"if-match": "other", "if-unmodified-since": AFTER}, FAILED),
    ({"if-none-match": "other", "if-modified-since": AFTER}, PROCEED),
    ({"if-none-match": ETAG, "if-modified-since": BEFORE}, NOT_MODIFIED),
    # What must hold is looked at before what must not.
    ({"if-match": "other", "if-none-match": ETAG}, FAILED),
    ({"if-match": ETAG, "if-none-match": ETAG}, NOT_MODIFIED),
    # A date that cannot be read counts as absent.
    ({"if-modified-since": "yesterday"}, PROCEED),
    ({"if-unmodified-since": "Thu, 99 Foo 2023"}, PROCEED),
    ({"if-unmodified-since": ""}, PROCEED),
]


@pytest.mark.parametrize(("headers", "outcome"), CASES)
def test_a_read_under_conditions(headers: dict[str, str], outcome: ConditionOutcome) -> None:
    assert evaluate_read(make_head("GET", "/b/k", headers), ETAG, MODIFIED_S) is outcome


@pytest.mark.parametrize(("headers", "outcome"), CASES)
def test_a_copy_goes_on_where_a_read_would(
    headers: dict[str, str], outcome: ConditionOutcome
) -> None:
    copy_headers = {f"x-amz-copy-source-{name}": value for name, value in headers.items()}
    head = make_head("PUT", "/b/k", copy_headers)
    assert evaluate_read(head, ETAG, MODIFIED_S) is PROCEED
    if outcome is PROCEED:
        check_copy_source(head, ETAG, MODIFIED_S)
    else:
        with pytest.raises(PreconditionFailed):
            check_copy_source(head, ETAG, MODIFIED_S)


@pytest.mark.parametrize(
    ("date", "outcome"),
    [
        ("Tuesday, 14-Nov-23 22:13:20 GMT", NOT_MODIFIED),
        ("Tue Nov 14 22:13:20 2023", NOT_MODIFIED),
        ("Tue Nov 14 22:13:19 2023", PROCEED),
    ],
)
def test_the_two_obsolete_forms_of_dates_are_read(date: str, outcome: ConditionOutcome) -> None:
    head = make_head("GET", "/b/k", {"if-modified-since": date})
    assert evaluate_read(head, ETAG, MODIFIED_S) is outcome


@pytest.mark.parametrize(
    ("value", "applies"),
    [
        (f'"{ETAG}"', True),
        (f'W/"{ETAG}"', False),
        ('"other"', False),
        (SAME, True),
        (BEFORE, False),
        (AFTER, False),
    ],
)
def test_a_range_applies_only_to_the_object_it_was_asked_of(value: str, applies: bool) -> None:
    head = make_head("GET", "/b/k", {"if-range": value})
    assert range_applies(head, ETAG, MODIFIED_S) is applies
    assert range_applies(make_head("GET", "/b/k"), ETAG, MODIFIED_S)


@pytest.mark.parametrize(
    ("headers", "condition"),
    [
        ({}, Condition()),
        ({"if-none-match": "*"}, Condition(absent=True)),
        ({"if-none-match": f'"{ETAG}"'}, Condition(not_etag=ETAG)),
        ({"if-none-match": ETAG}, Condition(not_etag=ETAG)),
        ({"if-match": f'"{ETAG}"'}, Condition(etag=ETAG)),
        ({"if-match": f" {ETAG} "}, Condition(etag=ETAG)),
        ({"if-match": "*"}, Condition(etag="*")),
    ],
)
def test_the_conditions_that_a_write_may_carry(
    headers: dict[str, str], condition: Condition
) -> None:
    assert write_condition(make_head("PUT", "/b/k", headers)) == condition


@pytest.mark.parametrize(
    "headers",
    [
        {"if-none-match": f'"{ETAG}", "other"'},
        {"if-none-match": f'W/"{ETAG}"'},
        {"if-none-match": ""},
        {"if-match": f'"{ETAG}", "other"'},
        {"if-match": f'W/"{ETAG}"'},
        {"if-match": ""},
        {"if-match": '""'},
        {"if-modified-since": BEFORE},
        {"if-unmodified-since": BEFORE},
    ],
)
def test_conditions_that_a_write_may_not_carry_are_not_ignored(headers: dict[str, str]) -> None:
    with pytest.raises(Unsupported):
        write_condition(make_head("PUT", "/b/k", headers))


def test_a_write_cannot_ask_for_an_object_to_be_there_and_not() -> None:
    with pytest.raises(InvalidRequest):
        write_condition(make_head("PUT", "/b/k", {"if-match": ETAG, "if-none-match": "*"}))
