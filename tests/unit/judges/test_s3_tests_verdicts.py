"""What the harness around Ceph's tests makes of their outcomes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.s3_tests.areas import AREAS, Tier, area_of
from tests.s3_tests.verdicts import (
    SCHEMES,
    Outcome,
    Verdict,
    complaints,
    read_expected,
    read_verdicts,
    rows,
)

MUST, COULD = "test_bucket_head", "test_set_cors"


def verdict(test: str, outcome: Outcome, *statuses: int) -> Verdict:
    return Verdict(test, f"file.py::{test}", outcome, "why", dict.fromkeys(statuses, 1))


def complaints_of(one: Verdict, *expected: str) -> list[str]:
    return complaints({one.test: one}, dict.fromkeys(expected, "reason"), is_whole=False)


@pytest.mark.parametrize(
    ("outcome", "is_expected", "is_complaint"),
    [
        (Outcome.PASSED, False, False),
        (Outcome.PASSED, True, True),
        (Outcome.FAILED, False, True),
        (Outcome.FAILED, True, False),
        (Outcome.ERROR, False, True),
        (Outcome.SKIPPED, False, False),
    ],
)
def test_the_list_of_expected_failures_is_strict(
    outcome: Outcome, is_expected: bool, is_complaint: bool
) -> None:
    expected = [MUST] if is_expected else []
    assert bool(complaints_of(verdict(MUST, outcome), *expected)) is is_complaint


def test_in_other_tiers_only_the_servers_own_errors_count() -> None:
    assert complaints_of(verdict(COULD, Outcome.FAILED, 501, 503, 404)) == []
    assert complaints_of(verdict(COULD, Outcome.FAILED, 500)) == [f"{COULD}: answered 500"]
    assert complaints_of(verdict(COULD, Outcome.PASSED, 502)) == [f"{COULD}: answered 502"]


def test_a_test_that_no_area_fits_is_a_complaint() -> None:
    assert "areas.py" in complaints_of(verdict("test_frobnicate", Outcome.PASSED))[0]


def test_an_expected_failure_that_the_suite_does_not_have_is_a_complaint() -> None:
    known = {MUST: verdict(MUST, Outcome.PASSED)}
    assert complaints(known, {"test_gone": "reason"}, is_whole=False) == []
    assert "test_gone" in complaints(known, {"test_gone": "reason"}, is_whole=True)[0]


def test_a_second_run_replaces_the_outcome_and_keeps_the_servers_errors(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    lines = [
        {"test": MUST, "node": "n", "outcome": "failed", "message": "m", "statuses": {"500": 1}},
        {"test": MUST, "node": "n", "outcome": "passed", "message": "", "statuses": {"200": 2}},
    ]
    record.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_verdicts(record)[MUST]
    assert (found.outcome, found.statuses) == (Outcome.PASSED, {200: 2, 500: 1})
    assert found.server_errors == (500,)


def test_rows_count_areas_and_tiers() -> None:
    found = rows([verdict(MUST, Outcome.PASSED), verdict("test_bucket_notexist", Outcome.ERROR)])
    assert [(row.tier, row.area, str(row)) for row in found] == [
        (Tier.MUST, "bucket_ops", "1 / 1 / 0"),
        (Tier.MUST, "total", "1 / 1 / 0"),
    ]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_expected_to_fail_is_of_the_tiers_that_are_judged(scheme: str) -> None:
    expected = read_expected(scheme)
    assert expected
    for test in expected:
        area = area_of(test)
        assert area is not None
        assert area.tier in (Tier.MUST, Tier.SHOULD)


@pytest.mark.parametrize("line", ["test_a", "test_a:", "ftp test_a: reason"])
def test_a_line_without_a_reason_or_of_another_protocol_is_refused(
    tmp_path: Path, line: str
) -> None:
    file = tmp_path / "expected.txt"
    file.write_text(f"# comment\n\n{line}\n")
    with pytest.raises(ValueError, match=r"expected\.txt"):
        read_expected("http", file)


def test_a_protocol_before_a_name_means_that_one_only(tmp_path: Path) -> None:
    file = tmp_path / "expected.txt"
    file.write_text("https test_a: its reason\ntest_b: another\n")
    assert read_expected("http", file) == {"test_b": "another"}
    assert read_expected("https", file) == {"test_a": "its reason", "test_b": "another"}


@pytest.mark.parametrize(
    ("test", "area"),
    [
        ("test_bucket_list_prefix_basic", "list_v1"),
        ("test_bucket_listv2_prefix_basic", "list_v2"),
        ("test_copy_enc[a-b]", "encryption_copy"),
        ("test_object_copy_to_itself", "copy"),
        ("test_object_create_bad_date_none_aws2", "auth_sigv2"),
        ("s3tests/x.py::test_atomic_write_1mb", "atomic"),
    ],
)
def test_a_test_has_the_area_of_its_name(test: str, area: str) -> None:
    found = area_of(test)
    assert found is not None
    assert found.name == area
    assert len({one.name for one in AREAS}) >= 36
