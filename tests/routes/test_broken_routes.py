"""What breaks beside or behind a relay in the middle of a delivery with a route: the link to the
engine, the storage server, the objects, the engine itself. Bytes stay right, and nothing is left.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from objectcache import DeliveryFailed, NotFound
from objectcache_schemas.operators.server_state import GetMetrics, Metrics
from tests.integration.served import wait_until
from tests.relay.relays import (
    BUCKET,
    CHUNKS,
    LAYOUT,
    NIXL,
    SLOW_BYTES_PER_S,
    TOKENS,
    RunningRelay,
    client_of,
    stocked_server,
)
from tests.routes.cut_link import CutLink
from tests.routes.routed import (
    EXPECTED,
    KEYS,
    PATIENT_S,
    check_delivery,
    fetch,
    routed_client,
    wait_quiet,
)
from tests.servers import RunningServer
from tests.storage_client import StorageClient

TRANSPORTS = ["body", "shared_memory", NIXL]
SLOW = 3 * SLOW_BYTES_PER_S  # a layer takes 0.13 s
ATTEMPTS = 5  # to stop a relay in the middle of a delivery
PUTS_MAX = 200  # of 3 MiB, into a store of 64


def wait_idle(server: RunningServer) -> None:
    """Until the storage server has no delivery any more, and so no lease of a target."""

    def is_idle() -> bool:
        with StorageClient(server.run_dir / "storage.sock") as storage:
            page = storage.ask(GetMetrics(), Metrics).text.decode()
        [running] = [
            sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == "objectcache_deliveries_running"
        ]
        return running == 0

    wait_until(is_idle, "the storage server has no delivery")


@pytest.mark.parametrize("how", ["reset", "silence"])
@pytest.mark.parametrize("layer", [0, 4])
@pytest.mark.parametrize("transport", ["body", NIXL])
def test_a_compute_link_that_is_cut_is_gone_on_without_from_the_layer_where_it_stood(
    server: RunningServer, tmp_path: Path, transport: str, layer: int, how: str
) -> None:
    for timeout_s in (3.0, PATIENT_S):  # a busy machine may keep the relay from layers for longer
        with (
            RunningRelay(server, tmp_path / "relay.log", "relay.fabric_timeout_s=3") as relay,
            CutLink(relay.endpoint) as link,
            routed_client(
                server,
                transport=transport,
                urls=[link.url],
                route="relay:b",
                relay_timeout_s=timeout_s,
            ) as client,
        ):
            with fetch(client) as delivery:
                check_delivery(delivery)
            with fetch(client, rate_bytes_per_s=SLOW) as delivery:
                delivery.wait_layer(layer)
                if delivery.route != "relay:b" and timeout_s != PATIENT_S:
                    continue
                assert delivery.route == "relay:b"
                getattr(link, how)()
                assert np.array_equal(delivery.wait(), EXPECTED)
                # Over NIXL the bytes themselves say how far they are, past a link that is silent.
                if transport != "nixl" or how != "silence":
                    assert delivery.route == "direct"
                    assert "relay:b failed: layer" in delivery.route_reason
                    missing = int(delivery.route_reason.split("layer ")[1].split()[0])
                    assert missing > layer
            held = delivery.wait()
            for _ in range(2):  # the relay cannot be reached any more, which costs time alone
                with fetch(client) as again:
                    check_delivery(again)
                    assert again.route == "direct"
            wait_quiet(relay)
            wait_idle(server)
            assert np.array_equal(held, EXPECTED)  # nothing was written late
            return


@pytest.mark.parametrize("route", ["relay:b", "split"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_storage_server_that_is_restarted_under_a_route_costs_what_was_missing(
    tmp_path: Path, transport: str, route: str
) -> None:
    with (
        stocked_server(tmp_path / "store") as server,
        RunningRelay(server, tmp_path / "relay.log") as relay,
        routed_client(
            server, relay, transport=transport, route=route, relay_timeout_s=PATIENT_S
        ) as client,
    ):
        with fetch(client) as delivery:
            check_delivery(delivery)
        with fetch(client, rate_bytes_per_s=SLOW) as delivery:
            delivery.wait_layer(1)
            server.kill_storage()
            server.restart_storage()
            try:
                assert np.array_equal(delivery.wait(), EXPECTED)
            except DeliveryFailed as failed:  # whoever was asked again was not there yet
                missing = failed.details.layer
                assert missing is not None
                assert 1 < missing < LAYOUT.num_layers
                for there in range(missing):
                    assert np.array_equal(delivery.ready_layer(there), EXPECTED[there])
        wait_quiet(relay)
        wait_idle(server)

        def comes_as_asked() -> bool:
            with fetch(client) as again:
                check_delivery(again)
                return again.route.startswith(route)

        wait_until(comes_as_asked, "deliveries take the route again")
        failures = client.route_counts().get(("relay:b", "failed"), 0)
        # It was not to blame; a body that is cut says nothing of why.
        assert failures <= (1 if transport == "body" else 0)
        wait_quiet(relay)
        wait_idle(server)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_is_evicted_between_a_match_and_its_read_is_missing_over_a_relay_as_directly(
    tmp_path: Path, transport: str
) -> None:
    with (
        stocked_server(tmp_path / "store") as server,
        RunningRelay(server, tmp_path / "relay.log", "relay.hold_s=60") as relay,
        routed_client(
            server, relay, transport=transport, route="relay:b", relay_timeout_s=PATIENT_S
        ) as client,
        client_of(server) as other,
    ):
        bucket = client.kv_bucket(BUCKET, LAYOUT)
        for gone in (4, 2):  # by HTTP, then over the session itself; the relay holds them all
            with fetch(client, route="relay:b") as delivery:
                assert np.array_equal(delivery.wait(), EXPECTED)
            assert bucket.match(KEYS) == len(KEYS)
            other.kv_bucket(BUCKET, LAYOUT).delete(KEYS[gone])
            with pytest.raises(NotFound) as caught:
                fetch(client)
            assert caught.value.details.missing_index == gone
            with fetch(client, on_missing="truncate") as delivery:
                assert delivery.chunk_count == gone
                assert np.array_equal(delivery.wait(), EXPECTED[:, :gone])
                assert delivery.route == "relay:b"
            other.kv_bucket(BUCKET, LAYOUT).put(KEYS, CHUNKS)
        assert client.route_counts().get(("relay:b", "refused"), 0) == 0
        wait_quiet(relay)
        wait_idle(server)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_others_puts_evict_between_a_match_and_its_read_is_missing_over_a_relay_too(
    tmp_path: Path, transport: str
) -> None:
    with (
        stocked_server(tmp_path / "store", "storage.capacity_bytes=67108864") as server,
        RunningRelay(server, tmp_path / "relay.log", "relay.hold_s=60") as relay,
        routed_client(
            server, relay, transport=transport, route="relay:b", relay_timeout_s=PATIENT_S
        ) as client,
        client_of(server) as other,
    ):
        with fetch(client) as delivery:  # which the relay holds
            assert np.array_equal(delivery.wait(), EXPECTED)
        bucket, others = client.kv_bucket(BUCKET, LAYOUT), other.kv_bucket(BUCKET, LAYOUT)
        assert bucket.match(KEYS) == len(KEYS)
        for number in range(1, PUTS_MAX):
            others.put(LAYOUT.chunk_keys(TOKENS + number * len(TOKENS)), CHUNKS)
            if others.match(KEYS) < len(KEYS):
                break
        with pytest.raises(NotFound) as caught:
            fetch(client)
        missing = caught.value.details.missing_index
        assert missing is not None
        assert missing < len(KEYS)
        if missing:
            with fetch(client, on_missing="truncate") as delivery:
                assert 0 < delivery.chunk_count <= missing
                assert np.array_equal(delivery.wait(), EXPECTED[:, : delivery.chunk_count])
                assert delivery.route == "relay:b"
        bucket.put(KEYS, CHUNKS)
        with fetch(client) as delivery:
            check_delivery(delivery)
            assert delivery.route == "relay:b"
        assert client.route_counts().get(("relay:b", "refused"), 0) == 0
        wait_quiet(relay)
        wait_idle(server)


ENGINE = """
import json, sys
from objectcache import Client, KvLayout
how = json.loads(sys.argv[1])
client = Client(how["endpoint"], access_key=how["access_key"], secret_key=how["secret_key"],
                transport=how["transport"], relays=["b=" + how["relay"]], route=how["route"],
                relay_timeout_s=how["patient_s"])
bucket = client.kv_bucket(how["bucket"], KvLayout(**how["layout"]))
with bucket.fetch(how["keys"], delivery="layerwise", rate_bytes_per_s=how["rate"]) as delivery:
    delivery.wait_layer(0)
    print(delivery.route, flush=True)
    delivery.wait()
"""


@pytest.mark.parametrize("route", ["relay:b", "split"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_engine_that_is_killed_under_a_route_leaves_nothing_at_relay_or_server(
    server: RunningServer, tmp_path: Path, transport: str, route: str
) -> None:
    credentials = server.credentials
    with RunningRelay(server, tmp_path / "relay.log", "relay.fabric_timeout_s=3") as relay:
        how = {
            "endpoint": server.endpoint,
            "relay": relay.endpoint,
            "route": route,
            "patient_s": PATIENT_S,
            "access_key": credentials.access_key,
            "secret_key": credentials.secret_key,
            "transport": transport,
            "bucket": BUCKET,
            "layout": {
                "num_layers": LAYOUT.num_layers,
                "chunk_tokens": LAYOUT.chunk_tokens,
                "per_layer_chunk_bytes": LAYOUT.per_layer_chunk_bytes,
                "dtype": LAYOUT.dtype,
                "fingerprint": LAYOUT.fingerprint,
            },
            "keys": LAYOUT.chunk_keys(TOKENS),
            "rate": 128 << 10,  # it would take 24 s
        }
        with subprocess.Popen(
            [sys.executable, "-c", ENGINE, json.dumps(how)], stdout=subprocess.PIPE
        ) as engine:
            try:
                assert engine.stdout is not None
                assert engine.stdout.readline().decode().startswith(route)
                assert relay.report()["deliveries"] == 1
            finally:
                engine.kill()
        wait_quiet(relay)
        wait_idle(server)
        with (
            routed_client(
                server, relay, transport=transport, route=route, relay_timeout_s=PATIENT_S
            ) as client,
            fetch(client) as delivery,
        ):
            check_delivery(delivery)
            assert delivery.route.startswith(route)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_relay_whose_time_to_drain_is_over_leaves_the_rest_to_the_direct_way(
    server: RunningServer, tmp_path: Path, transport: str
) -> None:
    for attempt in range(ATTEMPTS):
        log = tmp_path / f"relay-{attempt}.log"
        with (
            RunningRelay(server, log, "relay.drain_timeout_s=1") as relay,
            routed_client(
                server, relay, transport=transport, route="relay:b", relay_timeout_s=PATIENT_S
            ) as client,
        ):
            with fetch(client) as delivery:
                check_delivery(delivery)
            with fetch(client, rate_bytes_per_s=SLOW_BYTES_PER_S) as delivery:  # it takes 3 s
                delivery.wait_layer(0)
                relay.process.signal_stop()
                assert np.array_equal(delivery.wait(), EXPECTED)
                if delivery.route == "relay:b":  # a busy machine told it too late
                    continue
                assert delivery.route == "direct"
                assert "relay:b failed: layer" in delivery.route_reason
            assert relay.process.wait() == 0
            wait_idle(server)
            return
    pytest.fail("no relay was told to stop before it had brought all")
