"""docs/s3.md names what the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from objectcache_gateway.request.routes import Operation
from tests.s3_tests.areas import AREAS
from tests.s3_tests.verdicts import SCHEMES, read_expected

ROOT = Path(__file__).parents[3]
DOCUMENT = (ROOT / "docs" / "s3.md").read_text(encoding="utf-8")
OURS = ("Kv", "PutKv", "GetKv", "JoinKv", "GetUnconfigured")  # not of S3


@pytest.mark.parametrize("name", [one.value for one in Operation if not one.value.startswith(OURS)])
def test_an_operation_is_in_the_table(name: str) -> None:
    assert re.search(rf"\b{name}\b", DOCUMENT)


@pytest.mark.parametrize("area", [area.name for area in AREAS])
def test_an_area_of_cephs_tests_is_in_the_table(area: str) -> None:
    assert f"| {area} |" in DOCUMENT


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_expected_failure_is_there_with_its_reason(scheme: str) -> None:
    for test, reason in read_expected(scheme).items():
        assert f"`{test}`" in DOCUMENT
        assert reason in DOCUMENT


@pytest.mark.parametrize("match", re.findall(r"`(test_\w+\.py)(?:::(\w+))?`", DOCUMENT))
def test_a_test_that_is_named_exists(match: tuple[str, str]) -> None:
    file, test = match
    found = list((ROOT / "tests").rglob(file))
    assert len(found) == 1
    assert f"def {test}" in found[0].read_text(encoding="utf-8")
