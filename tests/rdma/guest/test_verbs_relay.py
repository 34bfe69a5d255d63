"""Deliveries over verbs into a relay, and out of it: real processes, on RDMA devices with a link
between them. The storage server has one end, the relay takes in on the other, and sends on from the
first one again; engines are on the second.
"""

from __future__ import annotations

import json
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from objectcache import Client
from objectcache.deliveries.delivery import Delivery
from objectcache.sessions.fabric_joining import FabricSettings
from objectcache_encodings.lossy import LOSSY_DTYPES, kv_shape
from objectcache_relay.forwarding import PIECE_BYTES_MAX
from objectcache_relay.landing.landing_regions import region_bytes_for
from objectcache_storage_server.transports.fabrics import STAGED_FRAGMENT_BYTES_MAX
from tests.encoded_delivery.prefixes import CHUNKS, DATA, KEYS
from tests.encoded_delivery.prefixes import LAYOUT as NORMAL
from tests.fetcher.fetchers import RunningFetcher
from tests.integration.served import wait_until
from tests.rdma.guest.whole_server import (
    CHUNK_COUNT,
    CLIENT_DEVICE,
    SERVER_DEVICE,
    client_of,
    layout_of,
    staged_bytes,
    stored_prefix,
)
from tests.relay.relays import RunningRelay, nothing_left
from tests.servers import RunningServer

BOUND_S = 240.0
LAYOUT = layout_of(6, 64 << 10)  # 2.5 MiB a layer
ENGINE = FabricSettings(verbs_device=CLIENT_DEVICE)
DSCP = 9
ROCE_PORT = (4791).to_bytes(2, "big")
TAKEN_BYTES = 256  # of a packet: what acknowledges is shorter
WAYS = (
    "storage.nixl=off",
    "relay.transport=verbs",
    f"relay.verbs_device={CLIENT_DEVICE}",
    f"storage.verbs_device={SERVER_DEVICE}",
    f"relay.ib_traffic_class={DSCP << 2}",
    "relay.hold_s=0",
    "relay.fabric_timeout_s=60",
    "relay.metrics_listen=off",
)


class Prefix:
    """What is stored, and how a client fetches it."""

    def __init__(self, server: RunningServer) -> None:
        with client_of(server) as client:
            bucket, self.keys, chunks = stored_prefix(client, LAYOUT)
        self.bucket_name = bucket.name
        self.layers = chunks.transpose(1, 0, 2)

    def fetch(self, client: Client, **how: object) -> Delivery:
        bucket = client.kv_bucket(self.bucket_name, LAYOUT)
        return bucket.fetch(self.keys, delivery="layerwise", timeout_s=BOUND_S, **how)  # type: ignore[arg-type]

    def check(self, delivery: Delivery) -> None:
        for layer in range(LAYOUT.num_layers):
            assert np.array_equal(delivery.wait_layer(layer, BOUND_S), self.layers[layer]), layer


@pytest.fixture(scope="module")
def prefix(server: RunningServer) -> Prefix:
    return Prefix(server)


@pytest.fixture
def relay(server: RunningServer, tmp_path: Path) -> Iterator[RunningRelay]:
    with RunningRelay(server, tmp_path / "relay.log", *WAYS) as running:
        yield running


def written_from(device: str) -> list[int]:
    """Lengths of what processes have registered with a device to write from, as the kernel knows
    them: no key of these reaches them.
    """
    shown = subprocess.run(
        ["rdma", "-j", "-d", "resource", "show", "mr", "dev", device],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return sorted(
        int(one["mrlen"]) for one in json.loads(shown.stdout) if int(one["rkey"], 16) == 0
    )


class ClassesOfTraffic:
    """The classes (byte 1 of the IP header) of RoCE packets with a payload that arrive over one
    link."""

    def __init__(self, interface: str) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0800))
        self._socket.bind((interface, 0x0800))
        self._socket.settimeout(0.2)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.seen: set[int] = set()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                packet = self._socket.recv(TAKEN_BYTES)
            except TimeoutError:
                continue
            is_roce = packet[9] == socket.IPPROTO_UDP and packet[22:24] == ROCE_PORT
            if is_roce and len(packet) == TAKEN_BYTES:
                self.seen.add(packet[1])

    def __enter__(self) -> ClassesOfTraffic:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._socket.close()


def test_every_byte_comes_through_a_relay_over_verbs_and_nothing_is_left(
    server: RunningServer, relay: RunningRelay, prefix: Prefix
) -> None:
    of_server = written_from(SERVER_DEVICE)
    payloads_bytes = (prefix.layers.nbytes, prefix.layers[2:4].nbytes)
    landing = [region_bytes_for(payload_bytes) for payload_bytes in payloads_bytes]
    with relay.client("verbs", fabric=ENGINE, timeout_s=BOUND_S) as engine:
        for _ in range(3):  # over HTTP, then over the session itself; landing memory is used again
            with prefix.fetch(engine) as delivery:
                prefix.check(delivery)
                assert delivery.transport == "verbs"
            wait_until(lambda: nothing_left(relay), "landing memory came back", BOUND_S)
        with prefix.fetch(engine, layers=(2, 4)) as some:
            assert np.array_equal(some.wait(BOUND_S), prefix.layers[2:4])
        staged = STAGED_FRAGMENT_BYTES_MAX  # which no delivery of the relay's uses
        assert written_from(SERVER_DEVICE) == sorted([*of_server, staged, *landing])
    wait_until(
        lambda: written_from(SERVER_DEVICE) == sorted([*of_server, staged]),
        "landing memory is lent to nobody",
        BOUND_S,
    )
    assert staged_bytes(server) == 0


def test_what_workers_of_a_fetcher_make_goes_on_over_verbs(
    server: RunningServer, tmp_path: Path
) -> None:
    keys = server.credentials
    lossy = LOSSY_DTYPES["lossy-q8"](kv_shape(NORMAL, heads=8, width=128))
    expected = np.empty((NORMAL.num_layers, CHUNKS, NORMAL.per_layer_chunk_bytes), np.uint8)
    for layer in range(NORMAL.num_layers):
        lossy.dequantise(lossy.quantise(DATA[:, layer], layer), layer, expected[layer])
    with (
        RunningFetcher(server, tmp_path / "fetcher.log", *WAYS) as fetcher,
        Client(
            server.endpoint,
            access_key=keys.access_key,
            secret_key=keys.secret_key,
            transport="verbs",
            fabric=ENGINE,
            timeout_s=BOUND_S,
            fetcher=fetcher.endpoint,
            relay_timeout_s=BOUND_S,
        ) as engine,
    ):
        bucket = engine.kv_bucket("made", NORMAL, lossy=lossy, create=True)
        bucket.put(KEYS, DATA)
        for _ in range(2):  # over HTTP, then over the session itself
            with bucket.fetch(KEYS, delivery="layerwise", timeout_s=BOUND_S) as delivery:
                assert np.array_equal(delivery.wait(BOUND_S), expected)
                assert (delivery.transport, delivery.route) == ("verbs", "relay:fetcher")
        stored_bytes = CHUNKS * NORMAL.num_layers * lossy.slice_bytes
        assert fetcher.decoded_bytes == {"plain": 2 * stored_bytes}
        assert PIECE_BYTES_MAX in written_from(SERVER_DEVICE)


def test_what_leaves_a_relay_has_its_class_of_traffic(
    server: RunningServer, relay: RunningRelay, prefix: Prefix
) -> None:
    """The storage server, which writes over the same link, has none."""
    with (
        client_of(server) as direct,
        relay.client("verbs", fabric=ENGINE, timeout_s=BOUND_S) as engine,
    ):
        with ClassesOfTraffic("rx2") as plain, prefix.fetch(direct) as delivery:
            prefix.check(delivery)
        with ClassesOfTraffic("rx2") as both, prefix.fetch(engine) as delivery:
            prefix.check(delivery)
    assert (plain.seen, both.seen) == ({0}, {0, DSCP << 2})


@pytest.mark.parametrize("layer", [0, 3])
def test_a_relay_that_is_killed_is_gone_on_without(
    server: RunningServer, relay: RunningRelay, prefix: Prefix, layer: int
) -> None:
    keys = server.credentials
    with Client(
        server.endpoint,
        access_key=keys.access_key,
        secret_key=keys.secret_key,
        transport="verbs",
        fabric=ENGINE,
        timeout_s=BOUND_S,
        relays=[f"b={relay.endpoint}"],
        route="relay:b",
        relay_timeout_s=BOUND_S,
    ) as client:
        rate = prefix.layers.nbytes / LAYOUT.num_layers / 4  # a layer takes 4 s
        with prefix.fetch(client, rate_bytes_per_s=rate) as delivery:
            delivery.wait_layer(layer, BOUND_S)
            assert delivery.route == "relay:b"
            relay.process.kill()
            prefix.check(delivery)
            assert delivery.route == "direct"
            assert "relay:b failed: layer" in delivery.route_reason
        assert delivery.chunk_count == CHUNK_COUNT
    wait_until(lambda: staged_bytes(server) == 0, "nothing is staged", BOUND_S)


def test_an_engine_that_ends_under_a_delivery_leaves_nothing_at_the_relay(
    server: RunningServer, relay: RunningRelay, prefix: Prefix
) -> None:
    rate = prefix.layers.nbytes / LAYOUT.num_layers / 4
    engine = relay.client("verbs", fabric=ENGINE, timeout_s=BOUND_S)
    delivery = prefix.fetch(engine, rate_bytes_per_s=rate)
    delivery.wait_layer(0, BOUND_S)
    assert not nothing_left(relay)
    engine.close()
    wait_until(lambda: nothing_left(relay), "landing memory came back", BOUND_S)
    delivery.close()
    with (
        relay.client("verbs", fabric=ENGINE, timeout_s=BOUND_S) as another,
        prefix.fetch(another) as again,
    ):
        prefix.check(again)
    wait_until(lambda: staged_bytes(server) == 0, "nothing is staged", BOUND_S)
