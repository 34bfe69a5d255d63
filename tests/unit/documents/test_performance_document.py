"""docs/performance.md names the commands that repeat its tables, and those that are named exist."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.__main__ import QUESTIONS
from benchmarks.figures.__main__ import DUAL_PATH, EXPERIMENTS
from benchmarks.shared_store.__main__ import QUESTIONS as SHARED_STORE_QUESTIONS

DOCUMENT = Path(__file__).parents[3] / "docs" / "performance.md"
COMMAND = re.compile(r"`(make \w+|python -m benchmarks|objectcache \w+)")
ONLY = re.compile(r"--only ([\w-]+)")


def sections() -> dict[str, str]:
    parts = re.split(r"(?m)^## (.+)$", DOCUMENT.read_text())
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_section_with_a_table_names_its_command() -> None:
    tables = {title: text for title, text in sections().items() if "\n| --- |" in text}
    assert len(tables) > 5
    assert [title for title, text in tables.items() if not COMMAND.search(text)] == []


def test_the_questions_that_are_named_can_be_asked() -> None:
    known = {*QUESTIONS, *SHARED_STORE_QUESTIONS, *(each.name for each in EXPERIMENTS)}
    named = set(ONLY.findall(DOCUMENT.read_text())) - {"QUESTION", "layerwise", "Mooncake"}
    assert named
    assert named <= known


def test_every_experiment_of_the_paper_has_a_line() -> None:
    text = sections()["The paper's figures"]
    shown = set(re.findall(r"`(\w+)`", text))
    own = {"pacing", "kernel_cap"}  # no figure of the paper's
    names = {experiment.name for experiment in EXPERIMENTS}
    simulated = {name for name in names if name.startswith(DUAL_PATH)}  # of docs/dual_path.md
    assert names - own - simulated <= shown
    readme = (Path(__file__).parents[3] / "benchmarks" / "README.md").read_text()
    assert simulated <= set(re.findall(r"\| `(\w+)` \|", readme))
