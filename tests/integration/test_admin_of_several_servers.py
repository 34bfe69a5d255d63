"""`objectcache admin` before several storage servers: each by its name, and all together."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from objectcache_operations.console.app import app
from tests.integration.fleet import ROOT, RunningFleet
from tests.integration.served import wait_until
from tests.integration.test_several_storage_servers import fetched, fill


@pytest.fixture(autouse=True)
def _no_settings_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OBJECTCACHE")]:
        monkeypatch.delenv(name)


class FleetAdmin:
    """Commands of an operator."""

    def __init__(self, fleet: RunningFleet) -> None:
        self.fleet = fleet
        self._endpoint = fleet.add_admin()

    def run(self, *arguments: str) -> Result:
        return CliRunner().invoke(
            app,
            ["admin", *arguments, "--endpoint", self._endpoint],
            env={
                "OBJECTCACHE_ACCESS_KEY": ROOT.access_key,
                "OBJECTCACHE_SECRET_KEY": ROOT.secret_key,
            },
        )

    def told(self, *arguments: str) -> Any:
        ran = self.run(*arguments, "--json")
        assert ran.stdout, ran.stderr
        return json.loads(ran.stdout)


@pytest.fixture(scope="module")
def admin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetAdmin]:
    directory: Path = tmp_path_factory.mktemp("fleet")
    with RunningFleet(directory, 2, "storage.engine=files") as fleet:
        fleet.each_alone(fill)
        yield FleetAdmin(fleet)


def states(admin: FleetAdmin) -> dict[str, str]:
    listed = admin.told("servers", "list")["servers"]
    return {one["server"]: "draining" if one.get("draining") else "serves" for one in listed}


def test_every_server_is_listed_by_its_name(admin: FleetAdmin) -> None:
    addresses = [one.address for one in admin.fleet.servers]
    assert states(admin) == dict.fromkeys(addresses, "serves")
    shown = admin.run("servers", "list").stdout
    assert all(Path(address).parent.name in shown for address in addresses)


def test_one_of_several_is_drained_by_its_name_and_requests_go_elsewhere(admin: FleetAdmin) -> None:
    first, second = (one.address for one in admin.fleet.servers)
    refused = admin.run("drain")
    assert refused.exit_code == 2
    assert "server must be one of" in refused.stderr
    try:
        health = admin.told("drain", "--server", first)
        assert health["status"] == "ok"
        shown = {one["process"]: one.get("message", "") for one in health["processes"]}
        assert (shown[f"storage {first}"], shown[f"storage {second}"]) == ("draining", "")
        assert f"storage {first} draining" in admin.run("health").stdout
        assert states(admin) == {first: "draining", second: "serves"}
        last = admin.run("drain", "--server", second)
        assert last.exit_code == 2
        assert "--last" in last.stderr
        assert states(admin)[second] == "serves"
        assert admin.told("drain", "--server", second, "--last")["status"] == "draining"
        admin.told("undrain", "--server", second)
        with admin.fleet.client() as client:
            for _ in range(10):
                assert fetched(client)
    finally:
        admin.run("undrain", "--server", first)
    assert states(admin) == {first: "serves", second: "serves"}


def test_traces_metrics_and_logs_are_those_of_all(admin: FleetAdmin) -> None:
    addresses = [one.address for one in admin.fleet.servers]
    with admin.fleet.client(transport="body") as client:
        for _ in range(40):
            assert fetched(client)
    traces = admin.told("trace", "--last", "40")
    assert len(traces) == 40
    begun_s = [one["started_unix_s"] for one in traces]
    assert begun_s == sorted(begun_s, reverse=True)
    level = admin.told("log-level", "info", "--process", "storage")
    told = {one["process"] for one in level["processes"]}
    assert told == {f"storage {address}" for address in addresses}


def test_health_names_a_server_that_does_not_answer(admin: FleetAdmin) -> None:
    standing = admin.fleet.servers[0]
    other = f"storage {admin.fleet.servers[1].address}"

    def failing() -> set[str]:
        health = admin.told("health")
        silent = {one["process"] for one in health["processes"] if not one["ok"]}
        assert f"storage {standing.address}" in silent
        assert health["status"] == ("unavailable" if other in silent else "degraded")
        return silent

    with standing.standing_still():
        wait_until(lambda: other not in failing(), "the other one to answer in time")
    wait_until(lambda: admin.told("health")["status"] == "ok", "the server to answer again")
