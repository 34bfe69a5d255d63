"""What becomes of a delivery when the relay, its engine or the storage server ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from objectcache import AccessDenied, Busy, DeliveryFailed, KvBucket, Unavailable
from objectcache.channel import requests
from objectcache_schemas.accounts import Access
from objectcache_schemas.descriptor import DeliveryMode, Descriptor
from tests.integration.served import wait_until
from tests.integration.tenants import grant, new_tenant
from tests.relay.relays import (
    BOUND_S,
    BUCKET,
    CHUNKS,
    LAYOUT,
    NIXL,
    SLOW_BYTES_PER_S,
    TOKENS,
    RunningRelay,
    check_get,
    client_of,
    nothing_left,
    stocked_server,
)
from tests.servers import RunningServer

ATTEMPTS = 5  # to kill a relay in the middle of a delivery


@pytest.mark.parametrize("transport", ["body", "shared_memory", NIXL])
@pytest.mark.parametrize("layer", [0, 3, 5])
def test_a_relay_that_is_killed_fails_the_get_with_the_layer_and_keeps_those_before(
    server: RunningServer, tmp_path: Path, transport: str, layer: int
) -> None:
    for attempt in range(ATTEMPTS):
        with (
            RunningRelay(server, tmp_path / f"relay-{attempt}.log") as relay,
            relay.client(transport) as client,
        ):
            bucket = client.kv_bucket(BUCKET, LAYOUT)
            with bucket.fetch(
                bucket.chunk_keys(TOKENS), delivery="layerwise", rate_bytes_per_s=SLOW_BYTES_PER_S
            ) as delivery:
                delivery.wait_layer(layer)
                relay.process.kill()
                assert delivery.progress.wait_ended(BOUND_S)
                if delivery.progress.complete:  # a busy machine killed it too late
                    continue
                with pytest.raises(DeliveryFailed) as caught:
                    delivery.wait()
                missing = caught.value.details.layer
                assert missing is not None
                assert layer < missing < LAYOUT.num_layers
                for there in range(missing):
                    assert np.array_equal(delivery.ready_layer(there), CHUNKS[:, there])
        with client_of(server) as direct:
            check_get(direct, layers=None)
        return
    pytest.fail("no relay was killed before it had brought all")


READER = """
import json, sys
import numpy as np
from objectcache import Client, KvLayout
how = json.loads(sys.argv[1])
client = Client(how["endpoint"], access_key=how["access_key"], secret_key=how["secret_key"],
                transport=how["transport"])
bucket = client.kv_bucket(how["bucket"], KvLayout(**how["layout"]))
with bucket.fetch(how["keys"], delivery="layerwise", rate_bytes_per_s=how["rate"]) as delivery:
    delivery.wait_layer(0)
    print("layer 0", flush=True)
    delivery.wait()
"""


@pytest.mark.parametrize("transport", ["body", "shared_memory", NIXL])
def test_an_engine_that_is_killed_ends_the_upstream_and_its_landing_memory_comes_back(
    server: RunningServer, relay: RunningRelay, transport: str
) -> None:
    credentials = server.credentials
    how = {
        "endpoint": relay.endpoint,
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
    engine = subprocess.Popen(
        [sys.executable, "-c", READER, json.dumps(how)], stdout=subprocess.PIPE
    )
    try:
        assert engine.stdout is not None
        assert engine.stdout.readline() == b"layer 0\n"
        assert not nothing_left(relay)
    finally:
        engine.kill()
        engine.wait()
        engine.stdout.close()  # type: ignore[union-attr]
    wait_until(lambda: nothing_left(relay), "landing memory came back", 12.0)
    with relay.client(transport) as client:
        check_get(client)


@pytest.mark.parametrize("transport", ["body", NIXL])
def test_a_storage_server_that_is_restarted_fails_the_get_with_its_layer_and_the_next_goes_well(
    tmp_path: Path, transport: str
) -> None:
    with (
        stocked_server(tmp_path / "store") as server,
        RunningRelay(server, tmp_path / "relay.log") as relay,
        relay.client(transport) as client,
    ):
        bucket = client.kv_bucket(BUCKET, LAYOUT)
        with bucket.fetch(
            bucket.chunk_keys(TOKENS),
            delivery="layerwise",
            rate_bytes_per_s=SLOW_BYTES_PER_S // 4,  # it would take 12 s
        ) as delivery:
            delivery.wait_layer(1)
            server.kill_storage()
            with pytest.raises(DeliveryFailed) as caught:
                delivery.wait()
            missing = caught.value.details.layer
            assert missing is not None
            assert 1 < missing < LAYOUT.num_layers
            for there in range(missing):
                assert np.array_equal(delivery.ready_layer(there), CHUNKS[:, there])
        wait_until(lambda: nothing_left(relay), "landing memory came back")
        server.restart_storage()
        check_get(client)


def test_a_relay_that_is_told_to_stop_refuses_the_next_get_and_finishes_the_first(
    server: RunningServer, tmp_path: Path
) -> None:
    with (
        RunningRelay(server, tmp_path / "relay.log", "relay.drain_timeout_s=30") as relay,
        relay.client() as client,
    ):
        bucket = client.kv_bucket(BUCKET, LAYOUT)
        keys = bucket.chunk_keys(TOKENS)
        with bucket.fetch(
            keys, delivery="layerwise", rate_bytes_per_s=SLOW_BYTES_PER_S // 3
        ) as delivery:  # which takes 9 s
            delivery.wait_layer(0)
            relay.process.signal_stop()
            wait_until(lambda: relay.report()["is_draining"], "the relay drains")
            with relay.client() as other, pytest.raises(Busy, match="about to stop"):
                other.kv_bucket(BUCKET, LAYOUT).fetch(keys)
            assert np.array_equal(delivery.wait(), CHUNKS.transpose(1, 0, 2))
        assert relay.process.wait() == 0


def test_an_engine_that_takes_nothing_of_a_body_is_given_up_after_the_fabrics_timeout(
    server: RunningServer, tmp_path: Path
) -> None:
    with (
        RunningRelay(server, tmp_path / "relay.log", "relay.fabric_timeout_s=6") as relay,
        relay.client() as client,
    ):
        # As many times the chunks: more than the system's buffers hold.
        keys = tuple(LAYOUT.chunk_keys(TOKENS)) * 16
        descriptor = Descriptor(
            keys,
            LAYOUT.num_layers,
            LAYOUT.chunk_tokens,
            LAYOUT.per_layer_chunk_bytes,
            DeliveryMode.LAYERWISE,
        )
        exchange = client._core.channel.open(requests.get(BUCKET, descriptor), BOUND_S)
        try:
            assert not nothing_left(relay)
            with relay.client() as other:  # whose deliveries it does not hold up
                check_get(other)
            wait_until(lambda: nothing_left(relay), "landing memory came back")
            with pytest.raises(Unavailable):
                exchange.read(len(keys) * LAYOUT.chunk_bytes)
        finally:
            exchange.abandon()


@pytest.mark.parametrize("transport", ["body", "shared_memory", NIXL])
def test_a_relay_may_read_what_its_jobs_user_may_for_as_long_as_the_key_is_in_force(
    server: RunningServer, tmp_path: Path, transport: str
) -> None:
    job = new_tenant(server, "job")
    with (
        RunningRelay(server, tmp_path / "relay.log", job=job.credentials) as relay,
        relay.client(transport) as client,
    ):
        keys = LAYOUT.chunk_keys(TOKENS)
        with pytest.raises(AccessDenied):  # of the root user's bucket
            KvBucket(client._core, BUCKET, LAYOUT).fetch(keys)
        job.change_user(grants=(grant(BUCKET, Access.READ),))
        for _ in range(2):  # over HTTP, then over the session itself
            check_get(client)
        job.delete_key()

        def is_refused() -> bool:
            try:
                check_get(client)
            except AccessDenied:
                return True
            return False

        wait_until(is_refused, "the key is not in force any more")
        wait_until(lambda: nothing_left(relay), "landing memory came back")


def test_two_relays_share_no_directory_and_a_killed_ones_is_taken_over(
    server: RunningServer, relay: RunningRelay, tmp_path: Path
) -> None:
    with RunningRelay(server, tmp_path / "killed.log") as killed:
        own, taken = f"server.run_dir={killed.run_dir}", f"server.run_dir={relay.run_dir}"
        with pytest.raises(AssertionError, match=r"another process listens.*server\.run_dir"):
            RunningRelay(server, tmp_path / "refused.log", taken)
        with relay.client("shared_memory") as client:
            check_get(client)
        killed.process.kill()
        with (
            RunningRelay(server, tmp_path / "next.log", own) as successor,
            successor.client("shared_memory") as client,
        ):
            check_get(client)
