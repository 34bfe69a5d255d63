"""The files of deploy/ for several servers name settings, hosts and secrets that go together.

They are read as text: what matters of them is plain enough, and no library for YAML is among the
tests' packages. `kubectl kustomize` and a container engine are not at hand.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from objectcache_runtime.settings import Settings, load_settings
from objectcache_schemas.errors import InvalidRequest
from objectcache_storage_server.engines.stores.rados.rados_settings import RadosSettings
from objectcache_storage_server.engines.stores.s3.s3_settings import S3Settings
from objectcache_storage_server.fleet.own_state import advertised_address

DEPLOY = Path(__file__).parents[3] / "deploy"
SHARED = DEPLOY / "kubernetes-shared"
COMPOSE = DEPLOY / "container" / "compose-shared.yaml"
RADOS = "rados://objectcache?conf=/etc/objectcache/store/ceph.conf&id=objectcache"
S3 = "s3://objectcache/store?endpoint=https://s3.internal:9000&region=us-east-1"


def commands(file: Path) -> dict[str, list[Settings]]:
    """The settings of each container, by the command that it runs; the pod's name is that of the
    first.
    """
    found: dict[str, list[Settings]] = {}
    text = (
        file.read_text()
        .replace("$(POD_NAME)", "objectcache-storage-0")
        .replace("$(ENGINE)", "local")
    )
    for block in re.findall(r"(?:args|command):\n((?:\s+- .*\n)+)", text):
        words = re.findall(r"- (.*)", block)
        command = next(word for word in words if not word.startswith("-") and word != "admin")
        sets = [word.removeprefix("--set=") for word in words if word.startswith("--set=")]
        found.setdefault(command, []).append(load_settings(None, {}, sets))
    return found


@pytest.mark.parametrize(
    ("storage", "gateways"),
    [(SHARED / "storage.yaml", SHARED / "gateways.yaml"), (COMPOSE, COMPOSE)],
    ids=["kubernetes", "compose"],
)
def test_gateways_know_servers_by_the_addresses_that_those_tell(
    storage: Path, gateways: Path
) -> None:
    servers = commands(storage)["storage"]
    told = {advertised_address(settings) for settings in servers}
    fronts = [
        settings
        for name, some in commands(gateways).items()
        if name != "storage"
        for settings in some
    ]
    assert len(fronts) >= 1
    for settings in fronts:
        assert told <= set(settings.gateway.storage_addresses)
        assert len(settings.gateway.storage_addresses) == 2
    for settings in (*servers, *fronts):
        assert settings.server.tls_certificate.startswith("/etc/objectcache/internal/")
        assert settings.server.tls_ca
    assert all(settings.storage.listen.endswith(":9100") for settings in servers)


def test_stores_are_named_as_they_are_opened() -> None:
    assert f"engine={RADOS}\n" in (SHARED / "kustomization.yaml").read_text()
    assert f"OBJECTCACHE_STORAGE_ENGINE={RADOS}" in COMPOSE.read_text()
    assert f"- {RADOS}\n" in (SHARED / "create-store" / "job.yaml").read_text()
    assert RadosSettings.from_url(RADOS).pool == "objectcache"
    assert f"engine={S3}\n" in (DEPLOY / "kubernetes-shared-s3" / "kustomization.yaml").read_text()
    assert S3Settings.from_address(S3, "", "").prefix == "store"
    with pytest.raises(InvalidRequest):
        RadosSettings.from_url(RADOS + "&nosuch=1")


def test_every_resource_is_listed_and_every_secret_is_said_to_be_made() -> None:
    text = (SHARED / "kustomization.yaml").read_text()
    listed = set(re.findall(r"^  - (\S+\.yaml)$", text, re.M))
    assert listed == {file.name for file in SHARED.glob("*.yaml")} - {"kustomization.yaml"}
    manifests = "".join(file.read_text() for file in SHARED.glob("*.yaml"))
    named = set(re.findall(r"secretKeyRef: \{name: ([a-z-]+)|secretName: ([a-z-]+)", manifests))
    secrets = {first or second for first, second in named}
    assert secrets == {"objectcache", "objectcache-internal", "objectcache-store"}
    assert all(f"secret {name} " in text for name in secrets)


def test_services_and_policies_name_ports_and_components_that_there_are() -> None:
    manifests = {file.name: file.read_text() for file in SHARED.glob("*.yaml")}
    pods = manifests["storage.yaml"] + manifests["gateways.yaml"]
    ports = set(re.findall(r"\{name: (\w+), containerPort", pods))
    components = set(re.findall(r"labels: .*component: (\w+)\}", pods))
    for name in ("services.yaml", "network-policy.yaml", "disruption-budgets.yaml"):
        assert set(re.findall(r"component: (\w+)", manifests[name])) <= components
        assert set(re.findall(r"(?:targetPort|port): ([a-z]\w+)", manifests[name])) <= ports
    assert components == {"storage", "gateway", "admin"}


def test_the_image_is_made_of_every_folder_that_the_wheel_is_made_of() -> None:
    wheel = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())
    packages = wheel["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    text = (DEPLOY / "container" / "Containerfile").read_text()
    copied = set(re.findall(r"^COPY (\w+) \1$", text, re.MULTILINE))
    assert copied == {package.partition("/")[0] for package in packages}
