"""The suite itself: fetched at one commit, with an environment of its own, outside of our tree."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

COMMIT = "8f0ae7b404a3a2fcf7038bf1e6bf29544fe9b6a3"
PUBLIC_SOURCE = "https://github.com/ceph/s3-tests"
SOURCE_VARIABLE = "S3_TESTS_SOURCE"
FOLDER_VARIABLE = "S3_TESTS_FOLDER"
# What test_s3.py and test_headers.py import; the suite's own list holds much that they do not.
REQUIREMENTS = (
    "boto3==1.44.5",
    "botocore[crt]==1.44.5",
    "isodate",
    "munch",
    "pytest>=8.4",
    "pytest-timeout",
    "pytest-xdist",
    "python-dateutil",
    "pytz",
    "requests",
)
TEST_FILES = ("s3tests/functional/test_s3.py", "s3tests/functional/test_headers.py")
TEST_TIMEOUT_S = 180
PLUGIN_FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Suite:
    """A working copy of the suite and the interpreter that runs it."""

    tree: Path
    python: Path

    def run(
        self,
        configuration: Path,
        record: Path,
        tests: Sequence[str],
        *,
        select: str,
        jobs: int,
        environment: Mapping[str, str],
    ) -> int:
        """Run it, or the `tests` that are named by their node ids. Returns pytest's status."""
        command = [str(self.python), "-m", "pytest", "-q", "-p", "recorder", "--tb=no", "-rN"]
        command += [f"--timeout={TEST_TIMEOUT_S}", "-p", "no:cacheprovider"]
        command += ["-n", str(jobs)] if jobs > 1 else []
        command += ["-k", select] if select else []
        variables = {
            **environment,
            "S3TEST_CONF": str(configuration),
            "S3_TESTS_RECORD": str(record),
            "PYTHONPATH": str(PLUGIN_FOLDER),
            "AWS_MAX_ATTEMPTS": "1",  # a retried 500 would count as a success
            "AWS_RETRY_MODE": "standard",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        return subprocess.run(
            [*command, *(tests or TEST_FILES)], cwd=self.tree, env=variables, check=False
        ).returncode


def fetched(folder: Path) -> Suite:
    """The suite at `COMMIT` below `folder`, made where it is missing. Needs git and a network, or
    a local copy of the repository in $S3_TESTS_SOURCE.
    """
    tree = folder / "s3-tests"
    if not (tree / ".git").exists():
        source = os.environ.get(SOURCE_VARIABLE, PUBLIC_SOURCE)
        _run("git", "clone", "--quiet", "--no-checkout", source, str(tree))
    _run("git", "-C", str(tree), "-c", "advice.detachedHead=false", "checkout", "--quiet", COMMIT)
    return Suite(tree, _environment(folder / "environment"))


def _environment(folder: Path) -> Path:
    """An interpreter with the suite's requirements; made again where they have changed."""
    python, stamp = folder / "bin" / "python", folder / "requirements"
    wanted = "\n".join(REQUIREMENTS)
    if not stamp.exists() or stamp.read_text() != wanted:
        _run(sys.executable, "-m", "venv", "--clear", str(folder))
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", "--quiet"]
        _run(*pip, "install", *REQUIREMENTS)
        stamp.write_text(wanted)
    return python


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
