"""Every setting is named by some test that is not about settings as such."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from objectcache_runtime.settings import SECTIONS, setting_fields

TESTS = Path(__file__).parents[2]
WORDS = frozenset(
    word
    for file in TESTS.rglob("*.py")
    if not file.name.startswith("test_settings_")
    for word in re.findall(r"\w+", file.read_text("utf-8"))
)
NAMES = [f"{section}.{field.name}" for section in SECTIONS for field in setting_fields(section)]


@pytest.mark.parametrize("name", NAMES)
def test_a_setting_is_named_by_a_test(name: str) -> None:
    assert name.split(".")[1] in WORDS, f"no test says what {name} does"
