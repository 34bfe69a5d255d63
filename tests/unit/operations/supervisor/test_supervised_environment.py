"""What each supervised process gets of the environment."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest

from objectcache_operations.supervisor.child import Child, ChildCommand
from objectcache_operations.supervisor.supervise import admin_child, gateway_children, storage_child
from objectcache_runtime.settings import Settings

ROOT = {"OBJECTCACHE_ROOT_ACCESS_KEY", "OBJECTCACHE_ROOT_SECRET_KEY"}
MASTER = {"OBJECTCACHE_MASTER_KEY"}
CLIENTS = {"OBJECTCACHE_SECRET_KEY", "OBJECTCACHE_ADMIN_TOKEN"}
STORE = {
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN",
}
PROGRAM = """
import json, os, sys
print("ready", json.dumps(sorted(os.environ)), flush=True)
sys.stdin.read()
"""


def test_a_child_gets_the_environment_without_what_is_withheld(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (*ROOT, *MASTER):
        monkeypatch.setenv(name, "x" * 32)
    command = ChildCommand(
        "child", (sys.executable, "-c", PROGRAM), "ready ", 1.0, withheld=frozenset(MASTER)
    )

    async def names() -> set[str]:
        child = Child(command)
        try:
            return set(json.loads(await child.start()))
        finally:
            await child.stop()

    got = asyncio.run(names())
    assert got >= ROOT | {"PATH"}
    assert not got & MASTER


def test_the_master_key_and_the_store_s_are_the_storage_server_s_and_the_root_key_the_others() -> (
    None
):
    settings = Settings()
    assert storage_child(settings, ()).withheld == ROOT | CLIENTS
    for child in (*gateway_children(settings, (), ()), admin_child(settings, ())):
        assert child.withheld == MASTER | STORE | CLIENTS
