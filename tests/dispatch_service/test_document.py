"""The example of docs/dual_path.md runs as it is written, and answers what it says."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from objectcache_gateway.dispatch_service.server import ROUTES
from objectcache_gateway.dispatch_service.topology_file import read_topology
from tests.dispatch_service.running import TIMEOUT_S
from tests.servers import ServerProcess

TEXT = (Path(__file__).parents[2] / "docs" / "dual_path.md").read_text("utf-8")
SECTION = TEXT[TEXT.index("## The dispatch service") :]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", SECTION, re.S)


def without_times(line: str) -> Any:
    """What a route is predicted to cost follows from how long the calls took."""
    document = json.loads(line) if line else None
    if isinstance(document, dict):
        document.pop("predicted_lateness_s", None)
    return document


def test_the_example_answers_what_the_document_says(tmp_path: Path) -> None:
    if shutil.which("curl") is None or shutil.which("openssl") is None:
        pytest.skip("curl or openssl is not installed")
    begin, calls = blocks("bash")
    make_token, command = begin.strip().splitlines()
    subprocess.run(["bash", "-ec", make_token], cwd=tmp_path, check=True)
    words = shlex.split(command.replace("dispatch-token", str(tmp_path / "dispatch-token")))
    assert words[:2] == ["objectcache", "dispatch"]
    service = ServerProcess(
        "objectcache_operations",  # the console, which becomes the service
        [*words[1:], "--listen", "127.0.0.1:0"],
        tmp_path / "log",
    )
    try:
        url = service.wait_ready()
        run = subprocess.run(
            ["bash", "-ec", calls.replace("http://127.0.0.1:9010", url)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    finally:
        assert service.terminate() == 0
    assert (run.returncode, run.stderr) == (0, "")
    (expected,) = blocks("json")
    assert list(map(without_times, run.stdout.splitlines())) == list(
        map(without_times, expected.splitlines())
    )


def test_the_topology_file_of_the_document_is_one(tmp_path: Path) -> None:
    (text,) = blocks("toml")
    file = tmp_path / "topology.toml"
    file.write_text(text)
    (node,) = read_topology(file)
    listed = tomllib.loads(text)["nodes"][0]
    assert node.name == listed["name"]
    assert node.workers[0].group == listed["workers"][0]["group"]


def test_every_call_is_in_the_table() -> None:
    rows = "\n".join(line for line in SECTION.splitlines() if line.startswith("| `"))
    for route in ROUTES:
        *_, last = route.path.split("/")
        assert f"{route.method} {route.path}`" in rows or f"`{last}`" in rows, route
