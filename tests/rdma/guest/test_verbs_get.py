"""Whole gets over verbs: the SDK, a gateway and a storage server as they are, on an RDMA device."""

from __future__ import annotations

import numpy as np
import pytest

from objectcache import Unavailable
from tests.rdma.guest.whole_server import (
    CHUNK_COUNT,
    client_of,
    layout_of,
    staged_bytes,
    stored_prefix,
)
from tests.servers import RunningServer

LAYOUT = layout_of(5, 4096)


def test_a_prefix_arrives_layer_by_layer_and_again(server: RunningServer) -> None:
    with client_of(server) as client:
        bucket, keys, chunks = stored_prefix(client, LAYOUT)
        for _ in range(2):
            with bucket.fetch(keys, delivery="layerwise") as delivery:
                assert delivery.transport == "verbs"
                for layer in range(LAYOUT.num_layers):
                    assert np.array_equal(delivery.wait_layer(layer), chunks[:, layer])
    assert staged_bytes(server) == 0


def test_more_layers_than_a_client_has_receives_are_all_announced(server: RunningServer) -> None:
    layout = layout_of(150, 512)
    with client_of(server) as client:
        bucket, keys, chunks = stored_prefix(client, layout)
        for _ in range(2):
            with bucket.fetch(keys, delivery="layerwise", rate_bytes_per_s=4 << 20) as delivery:
                for layer in range(layout.num_layers):
                    assert np.array_equal(delivery.wait_layer(layer), chunks[:, layer])


def test_memory_of_the_callers_own_is_filled(server: RunningServer) -> None:
    with client_of(server) as client:
        bucket, keys, chunks = stored_prefix(client, LAYOUT)
        buffer = np.zeros(chunks.nbytes, np.uint8)
        target = client.fabric_target(buffer=buffer, transport="verbs")
        for layers in ((0, 5), (2, 4)):
            buffer[:] = 0
            with bucket.fetch(keys, delivery="layerwise", layers=layers, target=target) as delivery:
                delivery.wait()
            expected = chunks[:, layers[0] : layers[1]].transpose(1, 0, 2).tobytes()
            assert buffer[: len(expected)].tobytes() == expected
            assert not buffer[len(expected) :].any()
        target.close()


@pytest.mark.parametrize(
    ("path", "chunk_count"),
    [("buffer", 1), ("direct", 1), ("batch", CHUNK_COUNT), ("agg", CHUNK_COUNT)],
)
def test_every_path_into_memory_brings_the_bytes(
    server: RunningServer, path: str, chunk_count: int
) -> None:
    with client_of(server) as client:
        bucket, keys, chunks = stored_prefix(client, LAYOUT)
        with bucket.fetch(keys[:chunk_count], path=path) as delivery:
            assert delivery.path == path
            assert np.array_equal(delivery.wait(), chunks[:chunk_count].transpose(1, 0, 2))


def test_a_put_is_read_out_of_the_clients_memory(server: RunningServer) -> None:
    with client_of(server) as client:
        bucket, keys, chunks = stored_prefix(client, LAYOUT)
        copies = [f"copy-{key}" for key in keys]
        put = bucket.put(copies, chunks, transport="verbs")
        assert put.stored == CHUNK_COUNT
        with bucket.fetch(copies, transport="body") as delivery:
            assert np.array_equal(delivery.wait(), chunks.transpose(1, 0, 2))
    assert staged_bytes(server) == 0


def test_a_client_without_such_a_device_is_told(server: RunningServer) -> None:
    with client_of(server, "mlx5_9") as client, pytest.raises(Unavailable, match="mlx5_9"):
        stored_prefix(client, LAYOUT)
