"""Read once, used twice: what lands for one engine is what another one gets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from objectcache import AccessDenied, Client, Delivery, NotFound
from objectcache_schemas.operators.server_state import GetMetrics, Metrics
from tests.integration.served import wait_until
from tests.relay.relays import (
    BUCKET,
    CHUNKS,
    LAYOUT,
    NIXL,
    PAYLOAD_BYTES,
    TOKENS,
    RunningRelay,
    check_get,
    client_of,
    nothing_left,
    stocked_server,
)
from tests.servers import RunningServer
from tests.storage_client import StorageClient

ATTEMPTS = 5  # to come while something arrives
CAP_GBPS = 0.02  # a payload takes 1.3 s to arrive
HELD = ("relay.metrics_listen=127.0.0.1:0", "relay.hold_s=60")
PAYLOAD = CHUNKS.transpose(1, 0, 2)


@pytest.fixture(scope="module")
def slow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    cap = f"scheduler.cap_gbps={CAP_GBPS}"
    with stocked_server(tmp_path_factory.mktemp("slow"), cap) as running:
        yield running


def delivered_bytes(server: RunningServer) -> float:
    """Bytes that the storage server has read for deliveries."""
    with StorageClient(server.run_dir / "storage.sock") as storage:
        page = storage.ask(GetMetrics(), Metrics).text.decode()
    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "objectcache_delivered_bytes_total"
    )


def begun(client: Client, **how: Any) -> Delivery:
    bucket = client.kv_bucket(BUCKET, LAYOUT)
    return bucket.fetch(bucket.chunk_keys(TOKENS), delivery="layerwise", **how)


@pytest.mark.parametrize(
    ("upstream", "first", "second"),
    [
        ("body", "body", "shared_memory"),
        ("shared_memory", "shared_memory", "body"),
        pytest.param("shared_memory", "nixl", "shared_memory", marks=NIXL.marks),
    ],
)
def test_a_prefix_that_two_engines_need_is_read_once(
    slow_server: RunningServer, tmp_path: Path, upstream: str, first: str, second: str
) -> None:
    for attempt in range(ATTEMPTS):
        log = tmp_path / f"relay-{attempt}.log"
        if comes_while_it_arrives(slow_server, log, upstream, first, second):
            return
    pytest.fail("no second engine came before all had arrived")


def comes_while_it_arrives(
    slow_server: RunningServer, log: Path, upstream: str, first: str, second: str
) -> bool:
    """Whether a part came to the second engine before the first one had all."""
    before = delivered_bytes(slow_server)
    with (
        RunningRelay(slow_server, log, f"relay.transport={upstream}", *HELD) as relay,
        relay.client(first) as prefill,
        relay.client(second) as decode,
    ):
        with begun(prefill) as one:
            one.wait_layer(1)
            with begun(decode) as other, begun(decode, layers=(3, 5)) as some:  # it still arrives
                assert np.array_equal(some.wait(), PAYLOAD[3:5])
                is_in_time = not one.progress.ended
                for layer, payload in other:
                    assert np.array_equal(payload, CHUNKS[:, layer]), f"layer {layer}"
                assert other.content == one.content is not None
            assert np.array_equal(one.wait(), PAYLOAD)
        check_get(decode)  # it is held
        samples = relay.samples()
        assert (samples["claims_total", "hit"], samples["claims_total", "miss"]) == (3, 1)
        assert samples["landing_bytes", "granted"] == 0
        assert samples["landing_bytes", "held"] >= PAYLOAD_BYTES
        assert nothing_left(relay)
    check_delivered(slow_server, before + PAYLOAD_BYTES)
    return is_in_time


def check_delivered(server: RunningServer, expected: float) -> None:
    """So much has been read, and no more."""
    wait_until(lambda: delivered_bytes(server) >= expected, "it is counted")
    assert delivered_bytes(server) == expected


@pytest.mark.parametrize("transport", ["body", "shared_memory", NIXL])
def test_an_engine_that_leaves_midway_leaves_the_other_what_lands(
    slow_server: RunningServer, tmp_path: Path, transport: str
) -> None:
    before = delivered_bytes(slow_server)
    with (
        RunningRelay(slow_server, tmp_path / "relay.log", *HELD) as relay,
        relay.client(transport) as decode,
    ):
        with relay.client("body") as prefill:
            one = begun(prefill)
            one.wait_layer(1)
            other = begun(decode)
            one.close()
        with other:
            assert np.array_equal(other.wait(), PAYLOAD)
        wait_until(lambda: relay.report()["deliveries"] == 0, "both have ended")
        with relay.client("body") as last:
            alone = begun(last)
            assert np.array_equal(alone.wait_layer(7), CHUNKS[:, 7])
            alone.close()
    check_delivered(slow_server, before + PAYLOAD_BYTES)


def test_a_delivery_that_nobody_wants_any_more_is_neither_finished_nor_held(
    slow_server: RunningServer, tmp_path: Path
) -> None:
    before = delivered_bytes(slow_server)
    with (
        RunningRelay(slow_server, tmp_path / "relay.log", *HELD) as relay,
        relay.client("body") as client,
    ):
        with begun(client, rate_bytes_per_s=PAYLOAD_BYTES / 12) as one:
            one.wait_layer(0)
        wait_until(
            lambda: relay.samples()["landing_bytes", "granted"] == 0, "the memory is given back"
        )
        assert relay.samples()["landing_bytes", "held"] == 0
        assert delivered_bytes(slow_server) < before + PAYLOAD_BYTES
        check_get(client)


@pytest.mark.parametrize("is_put_again", [True, False])
def test_what_is_deleted_is_not_served_from_what_is_held(
    tmp_path: Path, is_put_again: bool
) -> None:
    with (
        stocked_server(tmp_path / "store") as server,
        RunningRelay(server, tmp_path / "relay.log", *HELD) as relay,
        relay.client("body") as engine,
        client_of(server) as direct,
    ):
        check_get(engine)
        keys = LAYOUT.chunk_keys(TOKENS)
        direct.kv_bucket(BUCKET, LAYOUT).delete(keys[3])
        with pytest.raises(NotFound) as caught:
            engine.kv_bucket(BUCKET, LAYOUT).fetch(keys)
        assert caught.value.details.missing_index == 3
        if is_put_again:
            direct.kv_bucket(BUCKET, LAYOUT).put(keys, CHUNKS)
            check_get(engine)


def test_memory_that_is_held_is_had_by_whoever_needs_it(
    server: RunningServer, tmp_path: Path
) -> None:
    room = (f"relay.landing_bytes={4 << 20}", "relay.wait_s=0.001")  # for one of 3 MiB
    with (
        RunningRelay(server, tmp_path / "relay.log", *HELD, *room) as relay,
        relay.client("body") as client,
    ):
        keys = LAYOUT.chunk_keys(TOKENS)
        for _ in range(3):
            for count in (6, 5, 3):  # 3, 3 and 2 MiB of landing memory
                with client.kv_bucket(BUCKET, LAYOUT).fetch(keys[:count]) as delivery:
                    assert np.array_equal(delivery.wait(), PAYLOAD[:, :count])
                wait_until(lambda: nothing_left(relay), "it is held, and not in use any more")
        assert relay.samples()["claims_total", "miss"] == 9
        assert nothing_left(relay)


def test_another_key_claims_nothing(server: RunningServer, tmp_path: Path) -> None:
    with (
        RunningRelay(server, tmp_path / "relay.log", *HELD) as relay,
        relay.client("body") as client,
    ):
        check_get(client)
        with (
            Client(relay.endpoint, access_key="SOMEBODY", secret_key="x" * 40) as stranger,
            pytest.raises(AccessDenied),
        ):
            stranger.kv_bucket(BUCKET, LAYOUT).fetch(LAYOUT.chunk_keys(TOKENS))
        assert relay.samples()["claims_total", "miss"] == 1
