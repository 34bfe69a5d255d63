"""What a relay tells: the storage server of its engines, and whoever asks of itself."""

from __future__ import annotations

from pathlib import Path

from tests.integration.served import wait_until
from tests.relay.relays import (
    BUCKET,
    LAYOUT,
    PAYLOAD_BYTES,
    TOKENS,
    RunningRelay,
    check_get,
    nothing_left,
)
from tests.servers import RunningServer


def test_what_an_engine_consumes_teaches_the_storage_server_its_window(
    server: RunningServer, tmp_path: Path
) -> None:
    with (
        RunningRelay(server, tmp_path / "relay.log", "relay.hold_s=0") as relay,
        relay.client("shared_memory") as client,
    ):
        bucket = client.kv_bucket(BUCKET, LAYOUT)
        keys = bucket.chunk_keys(TOKENS)

        def learned() -> bool:
            with bucket.fetch(keys, delivery="layerwise", fingerprint="relay-model") as delivery:
                for layer, _ in delivery:
                    delivery.consumed(layer, 0.004)
                return delivery.window_source == "learned"

        wait_until(learned, "a window was learned through the relay")


def test_its_metrics_say_what_it_forwarded(server: RunningServer, tmp_path: Path) -> None:
    log = tmp_path / "relay.log"
    settings = ("relay.metrics_listen=127.0.0.1:0", "relay.in_flight_bytes_max=65536")
    with RunningRelay(server, log, *settings) as relay:
        with relay.client() as client:
            check_get(client)
            check_get(client)
        wait_until(lambda: nothing_left(relay), "landing memory came back")
        wait_until(lambda: relay.report()["deliveries"] == 0, "both have ended")
        samples = relay.samples()
        assert samples["forwarded_bytes_total", "tcp"] == 2 * PAYLOAD_BYTES
        assert samples["deliveries_total", ""] == 2
        assert samples["read_queue_bytes",] == 0
        assert samples["forward_lag_seconds_count",] == 2 * LAYOUT.num_layers
        assert relay.report()["rate_bytes_per_s"] > 0
