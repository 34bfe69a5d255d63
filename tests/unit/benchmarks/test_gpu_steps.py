"""What waits for a GPU runs by itself: each part in its turn, whatever becomes of the others."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.gpu import Step, main, pytest_of, python, run_steps, steps_of

LONG_S = 600.0
# Starts another process, says which, and stands still with it.
HANGS = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
time.sleep(600)
"""


def says(text: str, code: int = 0) -> tuple[str, ...]:
    return python("-c", f"print({text!r}); raise SystemExit({code})")


def given(*steps: Step) -> Callable[..., list[Step]]:
    return lambda folder, model, *, emulated: list(steps)


def test_what_fails_or_is_not_there_keeps_nothing_else_from_running(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [
        Step("fails", says("why", 3), LONG_S),
        Step("is not there", ("/nowhere/program",), LONG_S),
        Step("is left out", says("never"), LONG_S, "it has no tool"),
        Step("works", says("a figure"), LONG_S),
    ]
    assert main(["--results", str(tmp_path)], given(*steps)) == 1
    found = json.loads((tmp_path / "results.json").read_text())
    assert [(each["name"], each["how"], each["code"]) for each in found["steps"]] == [
        ("fails", "failed", 3),
        ("is not there", "failed", None),
        ("is left out", "left out", None),
        ("works", "right", 0),
    ]
    assert found["machine"]["date"].endswith("UTC")
    assert (tmp_path / "works.txt").read_text() == "a figure\n"
    text = (tmp_path / "results.md").read_text()
    assert "| works | right |" in text
    assert "why" in text
    assert "it has no tool" in capsys.readouterr().out


def test_without_a_failure_it_ends_with_0_and_only_what_was_asked_for_is_run(
    tmp_path: Path,
) -> None:
    steps = given(Step("bad", says("", 1), LONG_S), Step("good", says(""), LONG_S))
    assert main(["--results", str(tmp_path), "--only", "good"], steps) == 0
    assert not (tmp_path / "bad.txt").exists()
    with pytest.raises(SystemExit):
        main(["--results", str(tmp_path), "--only", "another"], steps)


def test_what_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    for limit_s in (3.0, 60.0):  # in which a busy machine may not have begun it
        steps = [Step("hangs", python("-c", HANGS), limit_s), Step("works", says("after"), LONG_S)]
        folder = tmp_path / f"{limit_s:g}"
        folder.mkdir()
        hung, after = run_steps(steps, folder, LONG_S)
        assert (hung.how, after.how) == ("out of time", "right")
        if hung.last_lines:
            break
    pid = int(hung.last_lines[0])
    deadline_s = time.monotonic() + 60
    while is_running(pid):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_no_step_begins_when_all_of_the_time_is_gone(tmp_path: Path) -> None:
    (late,) = run_steps([Step("late", says("never"), LONG_S)], tmp_path, 0.0)
    assert (late.how, late.last_lines) == ("left out", ("no time was left",))
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("emulated", [False, True])
def test_steps_are_of_files_that_are_there_and_a_real_model_is_one_that_was_given(
    tmp_path: Path, emulated: bool
) -> None:
    root = Path(__file__).parents[3]
    for step in steps_of(tmp_path, None, emulated=emulated):
        for word in step.command:
            assert not word.startswith("tests/") or (root / word).exists(), word
            assert (
                not word.startswith("benchmarks.")
                or (root / word.replace(".", "/")).with_suffix(".py").exists()
            )
    named = {step.name: step for step in steps_of(tmp_path, tmp_path, emulated=emulated)}
    real = named["ttft of a real model"]
    assert not real.without
    assert real.command[-1] == str(tmp_path)


def test_tests_that_were_all_skipped_are_no_success(tmp_path: Path) -> None:
    tests = tmp_path / "test_some.py"
    tests.write_text(
        "import pytest\ndef test_cuda(): pytest.skip('no GPU')\ndef test_emulated(): pass\n"
    )
    asked = [
        Step(kind, pytest_of(str(tests), chosen=kind), LONG_S) for kind in ("cuda", "emulated")
    ]
    ended = run_steps(asked, tmp_path, LONG_S)
    assert [each.how for each in ended] == ["failed", "right"]
