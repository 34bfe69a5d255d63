"""What the storage server sees to before it serves."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from objectcache_storage_server import __main__ as storage_main

_REFUSED_METADATA = """
from objectcache_schemas.errors import InvalidRequest
from objectcache_fabrics.nixl.agent import NixlAgent
agent = NixlAgent("server", "lo", "")
try:
    agent.add_peer(b"none")
except InvalidRequest as error:
    print("refused")
agent.close()
"""


@pytest.mark.parametrize(("own", "in_force"), [(None, "FATAL"), ("INFO", "INFO")])
def test_nixl_is_quiet_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: str | None, in_force: str
) -> None:
    seen: list[str | None] = []

    def run(serving: Coroutine[Any, Any, None]) -> None:
        serving.close()
        seen.append(os.environ.get("NIXL_LOG_LEVEL"))

    # Set first, so that what the process sets itself is undone too.
    monkeypatch.setenv("NIXL_LOG_LEVEL", own or "")
    if own is None:
        monkeypatch.delenv("NIXL_LOG_LEVEL")
    monkeypatch.setattr(storage_main, "configure_logging", lambda *_: None)
    monkeypatch.setattr(uvloop, "run", run)
    assert storage_main.main(["--data-dir", str(tmp_path)]) == 0
    assert seen == [in_force]


@pytest.mark.parametrize(("level", "is_said"), [("FATAL", False), ("WARN", True)])
def test_that_level_keeps_what_clients_send_out_of_the_log(level: str, is_said: bool) -> None:
    pytest.importorskip("nixl_cu12")
    environment = {**os.environ, "NIXL_LOG_LEVEL": level}
    ended = subprocess.run(
        [sys.executable, "-c", _REFUSED_METADATA],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "refused" in ended.stdout
    assert ("nixl_agent.cpp" in ended.stderr) == is_said


def test_a_wrong_device_for_nixl_ends_the_start_with_the_setting(tmp_path: Path) -> None:
    pytest.importorskip("nixl_cu12")
    flags = ["--data-dir", str(tmp_path), "--set", "storage.nixl_devices=mlx9_0:1,mlx5"]
    ended = subprocess.run(
        [sys.executable, "-m", "objectcache_storage_server", *flags],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    assert "storage.nixl_devices names several devices (mlx9_0:1,mlx5)" in ended.stderr
    assert not list(tmp_path.iterdir())
