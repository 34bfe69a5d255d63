"""docs/metrics.md, the dashboard and the alert rules name what there is, and all of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.documents.metric_names import Described, every_metric

ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "docs" / "metrics.md"
DASHBOARDS = sorted((ROOT / "deploy" / "grafana").glob("*.json"))
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yaml"
CONFIGURATION = ROOT / "deploy" / "prometheus" / "prometheus.yaml"

ROW = re.compile(r"^\| `(objectcache_\w+)` \| (\w+) \|([^|]*)\|([^|]+)\|([^|]*)\|$", re.M)
NAME = re.compile(r"\b(?:objectcache|process|python)_[a-z_]+\b")
PARTS = re.compile(r"_(?:bucket|count|sum)$")  # of a histogram
ADDED_LABELS = {"instance", "job", "le", "process"}  # by Prometheus, histograms, and the admin page
LABEL_LISTS = re.compile(r"(?:\bby|ignoring|group_left) \(([^)]*)\)")
SELECTORS = re.compile(r"\{([^}]*)\}")


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Described]:
    return every_metric(str(tmp_path_factory.mktemp("metrics")))


def process_metrics() -> set[str]:
    """Those of Prometheus' own collectors, which the document lists below the tables."""
    text = DOCUMENT.read_text("utf-8")
    return set(re.findall(r"`((?:process|python)_\w+)`", text))


def test_every_metric_is_documented_with_its_type_and_labels_and_no_other(
    metrics: dict[str, Described],
) -> None:
    documented = {
        name: Described(kind, tuple(re.findall(r"`(\w+)`", labels)))
        for name, kind, labels, _, _ in ROW.findall(DOCUMENT.read_text("utf-8"))
    }
    assert documented == metrics


def test_no_row_of_the_document_is_malformed() -> None:
    text = DOCUMENT.read_text("utf-8")
    rows = re.findall(r"^\| `objectcache_.*$", text, re.M)
    assert len(ROW.findall(text)) == len(rows)


def test_names_follow_prometheuss_conventions(metrics: dict[str, Described]) -> None:
    for name, metric in metrics.items():
        assert re.fullmatch(r"objectcache_[a-z]+(_[a-z]+)*", name)
        assert name.endswith("_total") == (metric.kind == "counter"), name
        assert not re.search(r"_(?:ms|kib|mib|percent|milliseconds)\b", name)
        assert "process" not in metric.labels, "the page adds that one"


def expressions(board: Any) -> Iterator[str]:
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]


def check_expression(expression: str, metrics: dict[str, Described]) -> None:
    """Every name in it is a metric's, and every label one of its metrics'."""
    without_texts = re.sub(r'"[^"]*"', '""', expression)
    names = {
        name if name in metrics else PARTS.sub("", name) for name in NAME.findall(without_texts)
    }
    assert names, expression
    known = set(ADDED_LABELS)
    for name in names - process_metrics():
        assert name in metrics, f"{name} is no metric: {expression}"
        known |= set(metrics[name].labels)
    used = [word for found in LABEL_LISTS.findall(without_texts) for word in found.split(",")]
    used += [word for found in SELECTORS.findall(without_texts) for word in found.split(",")]
    labels = {re.split(r"[=!~]", word)[0].strip() for word in used} - {""}
    assert labels <= known, f"{labels - known} are no labels there: {expression}"


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.name)
def test_a_dashboard_loads_and_asks_only_for_what_there_is(
    file: Path, metrics: dict[str, Described]
) -> None:
    board = json.loads(file.read_text("utf-8"))
    assert board["title"]
    assert board["uid"]
    assert board["schemaVersion"] >= 36
    variables = {variable["name"] for variable in board["templating"]["list"]}
    identifiers: set[int] = set()
    places: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        assert panel["id"] not in identifiers
        identifiers.add(panel["id"])
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (place["x"] + column, place["y"] + row)
            for column in range(place["w"])
            for row in range(place["h"])
        }
        assert not cells & places, f"{panel['title']} lies on another panel"
        places |= cells
        if panel["type"] != "row":
            assert panel["targets"]
            assert panel["datasource"]["uid"] == "${datasource}"
    for expression in expressions(board):
        check_expression(expression, metrics)
        assert expression.count("(") == expression.count(")")
        for variable in re.findall(r"\$(?!__)\{?(\w+)", expression):
            assert variable in variables


def test_the_dashboards_show_every_metric_but_what_only_explains(
    metrics: dict[str, Described],
) -> None:
    shown = {
        PARTS.sub("", name)
        for file in DASHBOARDS
        for expression in expressions(json.loads(file.read_text("utf-8")))
        for name in NAME.findall(expression)
    }
    for needed in (
        *("objectcache_requests_total", "objectcache_match_tokens_total"),
        *("objectcache_request_first_byte_seconds", "objectcache_tenant_stall_seconds_total"),
        *("objectcache_allocated_bytes_per_second", "objectcache_achieved_bytes_per_second"),
        *("objectcache_engine_operation_seconds", "objectcache_engine_evicted_bytes_total"),
        "objectcache_tenant_stored_bytes",
    ):
        assert needed in shown
    # Relays and fetchers are scraped by themselves, and not part of what these dashboards watch.
    elsewhere = ("objectcache_relay_", "objectcache_fetcher_")
    served = {name for name in metrics if not name.startswith(elsewhere)}
    assert len(shown & served) > len(served) * 0.6


def test_alerts_ask_only_for_what_there_is(metrics: dict[str, Described]) -> None:
    found = re.findall(r"expr: (?:\|\n((?: {10,}.*\n)+)|(.*)\n)", ALERTS.read_text("utf-8"), re.M)
    assert len(found) == ALERTS.read_text("utf-8").count("- alert:")
    for block, line in found:
        expression = block or line
        if NAME.search(expression):
            check_expression(expression, metrics)
        else:
            assert re.fullmatch(r'up\{job="(.*)"\} == 0', expression), expression
    configured = set(re.findall(r"job_name: (\S+)", CONFIGURATION.read_text("utf-8")))
    assert set(re.findall(r'job="([^"]*)"', ALERTS.read_text("utf-8"))) <= configured


def test_every_alert_says_what_is_wrong_and_what_to_do() -> None:
    text = ALERTS.read_text("utf-8")
    count = text.count("- alert:")
    for wanted in ("summary:", "description:", "severity:"):
        assert text.count(wanted) == count


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize("arguments", [("rules", str(ALERTS)), ("config", str(CONFIGURATION))])
def test_promtool_accepts_the_files(arguments: tuple[str, str]) -> None:
    kind, file = arguments
    options = ["--syntax-only"] if kind == "config" else []
    done = subprocess.run(
        ["promtool", "check", kind, *options, file], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
