"""What a relay that was cut off writes when it goes on is of the delivery's own objects."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from objectcache import Client, KvLayout
from objectcache.errors import DeliveryFailed, Unavailable
from objectcache.landing.targets import SharedMemoryTarget
from tests.integration.served import wait_until
from tests.relay.relays import BOUND_S, PAYLOAD_BYTES, RunningRelay, client_of
from tests.routes.routed import PATIENT_S, check_delivery, fetch, routed_client, wait_quiet
from tests.servers import RunningServer, standing_still

BUCKET = "replaced"
LAYOUT = KvLayout(
    num_layers=2,
    chunk_tokens=16,
    per_layer_chunk_bytes=8 << 20,
    dtype="uint8",
    fingerprint="replaced",
)
CHUNK_COUNT = 8  # a layer is several pieces, which are still to be written when one of it is
KEPT = CHUNK_COUNT - 2  # the last ones are replaced: what is written last lies there
OLD, NEW = 1, 2


def test_a_relay_that_goes_on_does_not_write_a_replaced_version_into_what_was_delivered(
    server: RunningServer, tmp_path: Path
) -> None:
    with client_of(server) as other:
        bucket = other.kv_bucket(BUCKET, LAYOUT, create=True)
        names = bucket.chunk_keys(np.arange(CHUNK_COUNT * LAYOUT.chunk_tokens))
        shape = (CHUNK_COUNT, LAYOUT.num_layers, LAYOUT.per_layer_chunk_bytes)
        old, new = np.full(shape, OLD, np.uint8), np.full(shape, NEW, np.uint8)
        bucket.put(names, old)
        with (
            RunningRelay(server, tmp_path / "relay.log") as relay,
            routed_client(
                server, relay, transport="shared_memory", route="relay:b", relay_timeout_s=6.0
            ) as client,
        ):
            target = client.shared_memory_target(CHUNK_COUNT * LAYOUT.chunk_bytes)
            delivery = client.kv_bucket(BUCKET, LAYOUT).fetch(
                names, target=target, delivery="layerwise"
            )
            try:
                while not target.array[0]:
                    pass
                os.kill(relay.process.pid, signal.SIGSTOP)
                replaced = names[KEPT:]
                for name in replaced:
                    bucket.delete(name)
                bucket.put(replaced, new[KEPT:])
                delivery.progress.wait_ended(BOUND_S)
            finally:
                os.kill(relay.process.pid, signal.SIGCONT)
            wait_quiet(relay)
            if delivery.progress.complete:  # it was stopped too late
                layers = target.array.reshape(LAYOUT.num_layers, CHUNK_COUNT, -1)
                assert np.all(layers[:, :KEPT] == OLD)
                assert np.all(layers[:, KEPT:] == layers[0, -1, -1])
            else:
                with pytest.raises(DeliveryFailed, match="not known to be those"):
                    delivery.wait()
            delivery.close()
            wait_until(lambda: target.is_lost, "the memory counts as lost")


@contextmanager
def warmed_client(
    server: RunningServer, relay: RunningRelay
) -> Iterator[tuple[Client, SharedMemoryTarget]]:
    """A client that has fetched over the relay, by HTTP and then over the session itself, into a
    target of its own and into the client's memory.
    """
    for timeout_s in (2.0, PATIENT_S):  # a busy machine may keep the relay for longer
        with routed_client(
            server, relay, transport="shared_memory", route="relay:b", relay_timeout_s=timeout_s
        ) as client:
            target = client.shared_memory_target(PAYLOAD_BYTES)
            if is_warmed(client, target):
                yield client, target
                return
    pytest.fail(f"not all came over the relay in {PATIENT_S} s each")


def is_warmed(client: Client, target: SharedMemoryTarget) -> bool:
    """Whether all has come over the relay."""
    for _ in range(2):
        for how in ({"target": target}, {}):
            try:
                with fetch(client, **how) as delivery:
                    check_delivery(delivery)
                    if delivery.route != "relay:b":
                        return False
            except (DeliveryFailed, Unavailable):  # the target is lost to the relay
                return False
    return True


def test_a_relay_that_does_not_answer_at_all_is_gone_on_without_in_other_memory(
    server: RunningServer, tmp_path: Path
) -> None:
    with (
        RunningRelay(server, tmp_path / "relay.log") as relay,
        warmed_client(server, relay) as (client, _),
        standing_still(relay.process.pid),
        fetch(client) as delivery,
    ):
        check_delivery(delivery)
        assert delivery.route == "direct"


def test_a_target_of_the_callers_own_is_lost_to_a_relay_that_does_not_answer_at_all(
    server: RunningServer, tmp_path: Path
) -> None:
    with (
        RunningRelay(server, tmp_path / "relay.log") as relay,
        warmed_client(server, relay) as (client, target),
    ):
        with (
            standing_still(relay.process.pid),
            pytest.raises(Unavailable, match="may still write to the memory"),
        ):
            fetch(client, target=target)
        wait_until(lambda: target.is_lost, "the memory counts as lost")
