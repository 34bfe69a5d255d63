"""Encoded puts that stand still hold no more of the server's memory than plain ones may."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import msgspec

from objectcache import KvLayout
from objectcache_schemas.limits import MIB
from objectcache_storage_server.engines.engine_calls import ENGINE_THREADS
from objectcache_storage_server.puts.receive_data import BUFFERS_BYTES
from tests.encoded_delivery.prefixes import client_of
from tests.integration.served import wait_until
from tests.s3_clients import open_socket, receive_answer, send_head, signed_headers
from tests.servers import RunningServer, start_server
from tests.unit.encodings.kv_numbers import kv_slices
from tests.unit.encodings.put_payloads import put_payload_of

PUTS, CHUNKS, LAYERS = 40, 2, 4
SLICE_BYTES = 1 * MIB  # the longest that are put encoded
LAYOUT = KvLayout(
    num_layers=LAYERS,
    chunk_tokens=16,
    per_layer_chunk_bytes=SLICE_BYTES,
    dtype="torch.bfloat16",
    fingerprint="stalled",
)
# Of each put its buffers, and of each thread the frames of one of them, decoded.
HELD_BYTES_MAX = PUTS * BUFFERS_BYTES + ENGINE_THREADS * 2 * SLICE_BYTES


def held_bytes(server: RunningServer, *kinds: str) -> int:
    """Memory of the storage server of these kinds."""
    status = Path(f"/proc/{server.storage_pid}/status").read_text("ascii")
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return sum(int(fields[kind].split()[0]) * 1024 for kind in kinds)


def begun(server: RunningServer, number: int, payload: bytes) -> socket.socket:
    """A put whose last byte does not come."""
    wire = {
        "v": 1,
        "chunk_keys": [f"{number}-{chunk}" for chunk in range(CHUNKS)],
        "num_layers": LAYERS,
        "chunk_tokens": LAYOUT.chunk_tokens,
        "per_layer_chunk_bytes": SLICE_BYTES,
        "delivery": "layerwise",
        "encoded_bytes": len(payload),
    }
    head = msgspec.msgpack.encode(wire)
    path = "/stalled?kv-put"
    length = {"Content-Length": str(4 + len(head) + len(payload))}
    signed = signed_headers(server, "POST", path, headers=length, payload_hash="UNSIGNED-PAYLOAD")
    connection = open_socket(server)
    send_head(connection, "POST", path, signed)
    connection.sendall(len(head).to_bytes(4, "big") + head + payload[:-1])
    return connection


def test_puts_of_frames_that_stand_still_hold_what_plain_ones_may(tmp_path: Path) -> None:
    data = kv_slices(LAYERS * CHUNKS, SLICE_BYTES, 2, seed=1)
    payload = put_payload_of(data.reshape(LAYERS, CHUNKS, SLICE_BYTES))
    assert len(payload) > BUFFERS_BYTES  # so that both buffers of each are filled
    with start_server(tmp_path, "storage.compaction_bytes_per_s=0") as server, ExitStack() as open_:
        with client_of(server) as client:
            client.kv_bucket("stalled", LAYOUT, create=True)
        before = {kind: held_bytes(server, kind) for kind in ("RssAnon", "RssShmem")}
        puts = [open_.enter_context(begun(server, number, payload)) for number in range(PUTS)]
        filled = before["RssShmem"] + PUTS * (BUFFERS_BYTES - SLICE_BYTES - MIB // 4)
        wait_until(lambda: held_bytes(server, "RssShmem") >= filled, "all buffers to be filled")
        grown = held_bytes(server, *before) - sum(before.values())
        assert grown <= HELD_BYTES_MAX, grown / MIB
        for connection in puts:
            connection.sendall(payload[-1:])
        answers = [receive_answer(connection, "POST") for connection in puts]
        assert [answer.status for answer in answers] == [200] * PUTS
