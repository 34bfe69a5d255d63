"""Clients that are killed, stopped or cut off while a whole server delivers to them over verbs.

Staging memory is one delivery's, so whoever keeps it keeps the next one from beginning.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import numpy as np
import pytest

from objectcache import DeliveryFailed, ObjectCacheError, Unavailable
from objectcache.kv_bucket import KvBucket
from tests.rdma.guest.whole_server import (
    client_of,
    layout_of,
    run_fetcher,
    staged_bytes,
    stored_prefix,
)
from tests.servers import RunningServer

LAYOUT = layout_of(16, 64 << 10)  # 40 MiB: about a second
BOUND_S = 60.0
Start = Callable[..., tuple[BaseProcess, Connection]]


def begun(start: Start, server: RunningServer, bucket: KvBucket) -> BaseProcess:
    """A process in the middle of a delivery."""
    keys = server.credentials
    layers, slice_bytes = str(LAYOUT.num_layers), str(LAYOUT.per_layer_chunk_bytes)
    process, pipe = start(
        run_fetcher,
        *(server.endpoint, keys.access_key, keys.secret_key, bucket.name, layers, slice_bytes),
    )
    assert pipe.recv() == "begun"
    return process


def wait_until_nothing_is_staged(server: RunningServer) -> None:
    deadline_s = time.monotonic() + BOUND_S
    while staged_bytes(server):
        assert time.monotonic() < deadline_s, "staging memory does not come back"


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_client_that_is_killed_or_stopped_gives_its_memory_back_to_others(
    server: RunningServer, processes: Start, fault: signal.Signals
) -> None:
    with client_of(server) as client:
        bucket, keys, chunks = stored_prefix(client, LAYOUT)
        process = begun(processes, server, bucket)
        os.kill(process.pid or 0, fault)
        with bucket.fetch(keys, delivery="layerwise", timeout_s=BOUND_S) as delivery:
            for layer in range(LAYOUT.num_layers):
                assert np.array_equal(delivery.wait_layer(layer, BOUND_S), chunks[:, layer])
        wait_until_nothing_is_staged(server)


def test_a_client_that_is_cut_off_fails_soon_and_joins_again_later(
    server: RunningServer, link: Callable[[str, str], None]
) -> None:
    """Its HTTP connection goes on: only the fabric is cut."""
    with client_of(server) as client:
        bucket, keys, chunks = stored_prefix(client, LAYOUT)
        # Slow, so that the link goes down long before the last layer is there.
        with bucket.fetch(keys, delivery="layerwise", rate_bytes_per_s=4 << 20) as delivery:
            delivery.wait_layer(0, BOUND_S)
            link("rx2", "down")
            with pytest.raises((DeliveryFailed, Unavailable)):
                delivery.wait(BOUND_S)
        wait_until_nothing_is_staged(server)
        with pytest.raises(ObjectCacheError):
            bucket.fetch(keys, delivery="layerwise").close()
        link("rx2", "restored")
        fetched = _fetched_again(bucket, keys)
        assert fetched == chunks.transpose(1, 0, 2).tobytes()


def _fetched_again(bucket: KvBucket, keys: list[str]) -> bytes:
    """A client does not ask again for a while after a refusal."""
    deadline_s = time.monotonic() + BOUND_S
    while True:
        try:
            with bucket.fetch(keys, delivery="layerwise") as delivery:
                return delivery.wait(BOUND_S).tobytes()
        except Unavailable:
            assert time.monotonic() < deadline_s
            time.sleep(0.5)
