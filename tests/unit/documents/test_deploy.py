"""The files in deploy name flags, settings and files that exist."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from objectcache_runtime.settings import SECTIONS, setting_fields

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
EXPOSURE_MAX = 20  # tenths: systemd calls up to 4.9 OK, and medium what is above
SETTING = re.compile(r"--set[= ,\"]+([a-z_]+)\.([a-z_]+)=")


def texts() -> list[tuple[Path, str]]:
    files = [file for file in DEPLOY.rglob("*") if file.is_file()]
    return [(file, file.read_text()) for file in files]


def test_every_setting_that_deploy_gives_exists() -> None:
    given = [
        (file.name, *match.groups()) for file, text in texts() for match in SETTING.finditer(text)
    ]
    assert len(given) >= 5
    for name, section, key in given:
        assert section in SECTIONS, (name, section)
        assert key in {field.name for field in setting_fields(section)}, (name, section, key)


def test_the_units_are_named_in_the_document() -> None:
    document = (ROOT / "docs/deployment.md").read_text()
    for unit in (DEPLOY / "systemd").iterdir():
        assert unit.name.replace("@.service", "@0") in document or unit.name in document, unit.name


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_is_hardened(unit: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    judged = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE_MAX}", unit],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "unrecognized option" in judged.stderr:
        pytest.skip("this systemd-analyze is too old to judge a file")
    assert judged.returncode == 0, judged.stdout[-500:] + judged.stderr


def test_kubernetes_manifests_render() -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    rendered = subprocess.run(
        [kubectl, "kustomize", str(DEPLOY / "kubernetes")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert rendered.returncode == 0, rendered.stderr
    kinds = re.findall(r"^kind: (\w+)$", rendered.stdout, re.MULTILINE)
    assert sorted(kinds) == [
        "Namespace",
        "NetworkPolicy",
        "PodDisruptionBudget",
        "Service",
        "Service",
        "StatefulSet",
    ]
