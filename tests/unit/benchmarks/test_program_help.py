"""Programs whose packages the benchmarks' own environment lacks say what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.basis.missing_packages import or_say_what_to_install


@pytest.mark.parametrize("name", ["gpu", "gpu_copies", "gpu_ttft", "vllm_connector", "vllm_ttft"])
def test_help_is_printed_or_else_a_sentence_with_what_to_install(name: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--help"],
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode == 0:
        assert run.stdout.startswith(f"usage: python -m benchmarks.{name}")
    else:
        assert run.stdout == ""
        (line,) = run.stderr.splitlines()
        assert " is not installed: " in line


def test_a_missing_package_is_named_beside_the_remedy() -> None:
    with (
        pytest.raises(SystemExit, match=r"^there_is_none_such is not installed: install it$"),
        or_say_what_to_install("install it"),
    ):
        import there_is_none_such  # type: ignore[import-not-found]  # noqa: F401
