"""What vLLM's own loggers and metrics show of the connector, and what an outage leaves behind."""

# ruff: noqa: F401, F811 (fixtures of another module)

from __future__ import annotations

import pickle
import re
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorLogging,
    KVConnectorProm,
)

from objectcache.connectors.vllm.reports.engine_metrics import COUNTERS, PREFIX
from tests.engines.test_vllm_connector import (
    BLOCK_BYTES,
    StartEngine,
    configs,
    extra_of,
    prompt,
    start,
    stored_by_another,
)
from tests.engines.vllm_engine import WAIT_S, Engine, EngineConfigs
from tests.servers import RunningServer, running_server

DOCUMENT = Path(__file__).parents[2] / "docs" / "vllm.md"


class Figures(KVConnectorProm):
    """vLLM's registration of a connector's metrics, in a registry of the test's own."""

    def __init__(self, config: Any, registry: CollectorRegistry) -> None:
        def counter(**arguments: Any) -> Counter:
            return Counter(**arguments, registry=registry)

        self._counter_cls = counter
        super().__init__(config, ["model_name", "engine"], {0: ["m", "0"]})


def stats_of(engine: Engine) -> dict[str, float]:
    """What the engine has counted, as the process that serves metrics gets it."""
    counted = engine.stats.pop(0)
    while engine.stats:
        counted = counted.aggregate(engine.stats.pop(0))
    arrived: dict[str, float] = pickle.loads(pickle.dumps(counted.to_dict()))
    return arrived


def step_until_counted(engine: Engine, *names: str) -> None:
    """Step until the engine has reported these: a lookup that took too long fails in its own
    thread, after the request that asked has gone on.
    """
    deadline_s = time.monotonic() + WAIT_S
    reported: set[str] = set()
    while not reported.issuperset(names):
        assert time.monotonic() < deadline_s, f"only {sorted(reported)} counted in {WAIT_S} s"
        engine.step()
        reported.update(*(stats.to_dict() for stats in engine.stats))


def test_vllms_log_line_and_metrics_show_what_the_connector_did(
    start: StartEngine, configs: EngineConfigs, server: RunningServer
) -> None:
    tokens = prompt(700, 100)
    first = stored_by_another(start, tokens)
    first.step()
    assert stats_of(first)["saved_blocks"] == 6
    second = start()
    second.answer("again", tokens)
    counted = stats_of(second)
    assert counted["hits"] == counted["loads"] == counted["lookups"] == 1
    assert counted["hit_tokens"] == 96
    assert counted["loaded_blocks"] == 6
    assert counted["loaded_bytes"] == 6 * BLOCK_BYTES
    assert counted["load_seconds"] > 0

    config = configs.vllm_config(extra_of(server))
    lines: list[str] = []
    logging = KVConnectorLogging(config.kv_transfer_config)
    logging.observe(dict(counted))
    logging.observe({"hits": 1})
    logging.log(lambda line, *values: lines.append(line % values))
    assert len(lines) == 1
    assert re.match(r"KV Transfer metrics: .*hits=2, hit_tokens=96.*loaded_mib=0.1", lines[0])

    registry = CollectorRegistry()
    figures = Figures(config, registry)
    figures.observe(counted)
    figures.observe({"hits": 1})
    page = generate_latest(registry).decode()
    assert 'vllm:objectcache_hits_total{engine="0",model_name="m"} 2.0' in page
    assert 'vllm:objectcache_hit_tokens_total{engine="0",model_name="m"} 96.0' in page


@pytest.mark.parametrize("name", sorted(COUNTERS))
def test_every_counter_is_documented(name: str) -> None:
    assert f"| `{PREFIX}{name}` |" in DOCUMENT.read_text()


def test_what_an_outage_kept_from_the_store_is_stored_with_the_next_request(
    tmp_path: Path, start: StartEngine
) -> None:
    tokens = prompt(701, 100)
    with running_server(tmp_path / "data") as server:
        first = start(on=server, load_timeout_s=1.0)
        server.kill_gateway()
        first.answer("during", tokens)
        first.saved()
        step_until_counted(first, "failed_puts", "failed_lookups")
        counted = stats_of(first)
        assert counted["failed_puts"] == counted["failed_lookups"] == 1
        server.restart_gateway()
        first.scheduler.kv_cache_manager.reset_prefix_cache()
        first.answer("after", tokens)
        first.saved()
        second = start(on=server)
        assert second.answer("again", tokens) == 96


def test_what_found_no_room_on_its_way_is_stored_with_the_next_request(
    start: StartEngine,
) -> None:
    tokens = prompt(702, 1000)
    first = start(staging_bytes_max=40 * BLOCK_BYTES)
    first.answer("first", tokens)
    first.saved()
    assert first.worker._worker.saves.dropped_blocks > 0
    first.step()
    first.scheduler.kv_cache_manager.reset_prefix_cache()
    assert 0 < first.answer("again", tokens) < 992
    first.saved()
    assert start().answer("whole", tokens) == 992
