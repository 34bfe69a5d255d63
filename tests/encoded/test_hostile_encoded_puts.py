"""Puts of frames by clients that lie: what they say is refused by its name, nothing is stored, the
server's memory stays as it is, and the same session goes on to put.
"""

from __future__ import annotations

import base64
import mmap
import re
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
import zstandard

from objectcache import Client
from objectcache.core import TransportChoice
from objectcache.puts.put_sinks import put_parts
from objectcache_encodings.frames import FrameHeader, SliceCodec
from objectcache_schemas.descriptor import TARGET_ID_BYTES
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import MIB
from objectcache_schemas.records import StoredEncoding, Verification
from tests.encoded.test_encoded_puts import (
    CHUNKS,
    DEFLATE,
    KEYS,
    LAYOUT,
    ZSTD,
    Bytes,
    bucket_of,
    encoded_payload,
    numbers,
    objects_of,
)
from tests.integration.served import BOUND_S
from tests.s3_clients import (
    Answer,
    call,
    open_socket,
    receive_answer,
    send_head,
    signed_headers,
)
from tests.servers import RunningServer, start_server
from tests.storage_client import StorageClient, TargetClient

LAYERS, SLICE_BYTES = LAYOUT.num_layers, LAYOUT.per_layer_chunk_bytes
PLAIN_BYTES = CHUNKS * LAYERS * SLICE_BYTES
HEAD = struct.Struct("<IIII")  # of a directory of one run: runs, layers, chunks, codec
GROWTH_BYTES_MAX = 96 * MIB
UNSIGNED = "UNSIGNED-PAYLOAD"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    settings = ("storage.compaction_bytes_per_s=0", "storage.nixl=trusting")
    with start_server(tmp_path_factory.mktemp("hostile-puts"), *settings) as running:
        yield running
        logs = running.gateway.log_tail() + running.storage.log_tail()
    assert "Traceback" not in logs, logs


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    keys = server.credentials
    with Client(server.endpoint, access_key=keys.access_key, secret_key=keys.secret_key) as opened:
        yield opened


def wire_of(payload: bytes, **changed: Any) -> dict[str, Any]:
    """A descriptor as it is sent, some fields of which are another's idea."""
    wire = {
        "v": 1,
        "chunk_keys": KEYS,
        "num_layers": LAYERS,
        "chunk_tokens": LAYOUT.chunk_tokens,
        "per_layer_chunk_bytes": SLICE_BYTES,
        "delivery": "layerwise",
        "encoded_bytes": len(payload),
    }
    return wire | changed


@dataclass(slots=True)
class Sender:
    """Sends puts in bodies, or out of one target of one session."""

    server: RunningServer
    bucket: str
    memory: mmap.mmap | None = None
    target_id: bytes = b""

    def put(self, wire: dict[str, Any], payload: bytes) -> Answer:
        """A put of a descriptor and a payload as they are."""
        body = payload
        if self.memory is not None:
            self.memory[: len(payload)] = payload
            target = {"transport": "shared_memory", "target_id": self.target_id, "offset_bytes": 0}
            wire = wire | {"rdma_target": target | {"length_bytes": len(payload), "tag": 1}}
            body = b""
        head = msgspec.msgpack.encode(wire)
        whole = len(head).to_bytes(4, "big") + head + body
        return call(self.server, "POST", f"/{self.bucket}?kv-put", whole)

    def refused(self, wire: dict[str, Any], payload: bytes, *words: str) -> Answer:
        """A put that is the client's fault, for a reason that has these words."""
        answer = self.put(wire, payload)
        assert answer.status == 400, (answer.status, answer.body)
        message = answer.xml.findtext("Message") or ""
        assert all(word in message for word in words), message
        return answer


@pytest.fixture(params=["body", "shared_memory"])
def sender(
    request: pytest.FixtureRequest, server: RunningServer, client: Client
) -> Iterator[Sender]:
    name = request.node.name.split("[")[0].removeprefix("test_")[-40:]
    bucket = f"{request.param}-{name}".replace("_", "-")[:63].strip("-")
    bucket_of(server, client, bucket, encoding=StoredEncoding(ZSTD))
    if request.param == "body":
        yield Sender(server, bucket)
        return
    with (
        StorageClient(server.run_dir / "storage.sock") as storage,
        TargetClient(storage) as session,
    ):
        target_id, memory = session.register(4 * PLAIN_BYTES)
        assert len(target_id) == TARGET_ID_BYTES
        yield Sender(server, bucket, memory, target_id)


def goes_on(sender: Sender, payload: bytes, data: Bytes) -> None:
    """Nothing was stored, and a good put by the same way is."""
    assert objects_of(sender.server, sender.bucket) == {}
    answer = sender.put(wire_of(payload), payload)
    assert answer.status == 200, answer.body
    assert msgspec.msgpack.decode(answer.body) == {"v": 1, "stored": CHUNKS, "existing": 0}
    stored = objects_of(sender.server, sender.bucket)
    assert [stored[key][0] for key in KEYS] == [chunk.tobytes() for chunk in data]


LEAST_BYTES = PLAIN_BYTES // 16


@pytest.mark.parametrize("stored_before", [False, True])
def test_a_descriptor_that_cannot_be_is_refused_by_its_field(
    sender: Sender, stored_before: bool
) -> None:
    data = numbers(1)
    _, payload = encoded_payload(sender.bucket, data)
    if stored_before:
        assert sender.put(wire_of(payload), payload).status == 200
    before = objects_of(sender.server, sender.bucket)
    lengths = [-1, 0, 1, LEAST_BYTES - 1, PLAIN_BYTES, 1 << 40, (1 << 63) - 1, (1 << 64) - 1]
    for wrong in (*lengths, -(1 << 63), 1.5, float("nan"), True, "320", b"", [], {}):
        answer = sender.refused(wire_of(payload, encoded_bytes=wrong), payload, "encoded_bytes")
        assert answer.code == "InvalidDescriptor"
    for name, wrong, word in (
        ("delivery", "chunkwise", "delivery"),
        ("delivery", "auto", "delivery"),
        ("layers", [0, 1], "layers"),
        ("part", [0, CHUNKS], "part"),
        ("encodings", [ZSTD], "encodings"),
        ("per_layer_chunk_bytes", 2 * MIB, "per_layer_chunk_bytes"),
        ("num_layers", LAYERS + 1, "num_layers"),
        ("chunk_keys", [KEYS[0]] * CHUNKS, "chunk_keys"),
    ):
        sender.refused(wire_of(payload, **{name: wrong}), payload, word)
    for wrong in (len(payload) - 64, len(payload) - 1, len(payload) + 1, len(payload) + 64):
        sender.refused(wire_of(payload, encoded_bytes=wrong), payload)
        other = payload.ljust(wrong, b"\0")[:wrong]
        sender.refused(wire_of(other), other, "encoded_bytes")
    if stored_before:
        assert objects_of(sender.server, sender.bucket) == before
        again = msgspec.msgpack.decode(sender.put(wire_of(payload), payload).body)
        assert again == {"v": 1, "stored": 0, "existing": CHUNKS}
    else:
        goes_on(sender, payload, data)


def signed_directory(words: bytes, length_bytes: int) -> bytes:
    """A directory with a checksum that is right, whatever it says."""
    return (words + xxhash.xxh3_64_intdigest(words).to_bytes(8, "little")).ljust(
        length_bytes, b"\0"
    )


def test_a_directory_that_lies_is_refused(sender: Sender) -> None:
    data = numbers(2)
    _, payload = encoded_payload(sender.bucket, data)
    end = HEAD.size + 4 * LAYERS
    runs, layers, chunks, codec = HEAD.unpack_from(payload)
    pitches = struct.unpack_from(f"<{LAYERS}I", payload, HEAD.size)
    heads = [
        (runs, layers, chunks - 1, codec),
        (runs, layers, chunks + 1, codec),
        (runs, layers, (1 << 32) - 1, codec),
        (runs, layers - 1, chunks, codec),
        (runs, (1 << 32) - 1, chunks, codec),
        (0, layers, chunks, codec),
        (2, layers, chunks, codec),
        ((1 << 32) - 1, layers, chunks, codec),
        (runs, layers, chunks, 0),
        (runs, layers, chunks, 3),
        (runs, layers, chunks, (1 << 32) - 1),
    ]
    rows = [
        (0, *pitches[1:]),
        (1, *pitches[1:]),
        ((1 << 32) - 1, *pitches[1:]),
        (pitches[1], pitches[0], *pitches[2:]),  # of the same sum
    ]
    told = [
        "5 chunks has 4 in its runs",
        "5 chunks has 6 in its runs",
        f"5 chunks has {(1 << 32) - 1} in its runs",
        "3 layers says that it has 1 runs of 2 layers",
        f"1 runs of {(1 << 32) - 1} layers",
        "0 runs of 3 layers",
        "does not match its checksum",  # where a directory of two runs has it
        f"{(1 << 32) - 1} runs of 3 layers",
        f"pitches of {SLICE_BYTES} to {SLICE_BYTES} bytes",
        *["a codec that is none of 0, 1, 2"] * 2,
        "pitches of 1 to",
        "encoded_bytes is",
        "pitches of 1 to",
        "layer 0 of chunk_keys[1]",
    ]
    lies = [HEAD.pack(*head) + payload[HEAD.size : end] for head in heads]
    lies += [payload[: HEAD.size] + struct.pack(f"<{LAYERS}I", *row) for row in rows]
    for words, what in zip(lies, told, strict=True):
        lie = signed_directory(words, 64) + payload[64:]
        sender.refused(wire_of(lie), lie, what)
    unsigned = payload[:end] + bytes(8) + payload[end + 8 :]
    sender.refused(wire_of(unsigned), unsigned, "directory")
    goes_on(sender, payload, data)


def forged_frames(slice_: bytes) -> list[bytes]:
    """Frames of codec planes-zstd whose `coded_check` is right and that are nothing of the kind."""
    plane_bytes = SLICE_BYTES // 2
    raw, plane = slice_[::2], slice_[1::2]
    checksum = xxhash.xxh3_64_intdigest(slice_)
    zstd = zstandard.ZstdCompressor(1)

    def frame(coded: bytes, element_bytes: int = 2, says: int = checksum) -> bytes:
        header = FrameHeader(SliceCodec.PLANES_ZSTD, element_bytes, says)
        return header.to_bytes(coded) + raw + coded

    bomb = zstd.compress(bytes(256 * MIB))
    return [
        frame(zstd.compress(plane), says=checksum ^ 1),
        frame(zstd.compress(plane), element_bytes=4),
        frame(zstd.compress(plane), element_bytes=3),
        frame(zstd.compress(plane[:-1])),
        frame(zstd.compress(plane + b"\0")),
        frame(zstd.compress(plane)[:-1]),
        frame(zstd.compress(plane) + b"\0"),
        frame(zstandard.ZstdCompressor(1, write_content_size=False).compress(plane)),
        frame(b""),
        frame(bytes(64)),
        frame(bomb[:plane_bytes]),
        FrameHeader(SliceCodec.PLAIN, 1, checksum).to_bytes(b"") + raw,
    ]


def test_a_forged_frame_is_told_by_its_layer_and_chunk_and_costs_no_memory(sender: Sender) -> None:
    data = numbers(3)
    _, payload = encoded_payload(sender.bucket, data)
    (pitch,) = struct.unpack_from("<I", payload, HEAD.size)
    before = peak_bytes(sender.server)
    for forged in forged_frames(data[2, 0].tobytes()):
        begin = 64 + 2 * pitch
        lie = payload[:begin] + forged.ljust(pitch, b"\0")[:pitch] + payload[begin + pitch :]
        answer = sender.refused(
            wire_of(lie), lie, "payload", "layer 0", "chunk_keys[2]", f"({KEYS[2]!r})"
        )
        assert answer.code == "BadDigest"
    assert peak_bytes(sender.server) - before < GROWTH_BYTES_MAX
    goes_on(sender, payload, data)


def peak_bytes(server: RunningServer) -> int:
    """The most that the storage server has had in memory."""
    status = Path(f"/proc/{server.storage_pid}/status").read_text("ascii")
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def test_random_changes_are_refused_or_change_nothing(sender: Sender) -> None:
    """Where a byte is no longer what was put, or the put says something else of it."""
    data = numbers(4)
    _, payload = encoded_payload(sender.bucket, data)
    generator = np.random.default_rng(5)
    before = peak_bytes(sender.server)
    for _ in range(40):
        lie = bytearray(payload)
        begin = int(generator.choice([0, 64, int(generator.integers(0, len(payload)))]))
        end = min(len(payload), begin + int(generator.integers(1, 4096)))
        lie[begin:end] = generator.bytes(end - begin)
        assert sender.refused(wire_of(bytes(lie)), bytes(lie)).code == "BadDigest"
    assert peak_bytes(sender.server) - before < GROWTH_BYTES_MAX
    goes_on(sender, payload, data)


def test_lies_over_nixl_are_refused_too(server: RunningServer) -> None:
    pytest.importorskip("nixl_cu12", reason="NIXL is not installed")
    keys = server.credentials
    with Client(
        server.endpoint,
        access_key=keys.access_key,
        secret_key=keys.secret_key,
        transport="nixl",
    ) as client:
        bucket = bucket_of(server, client, "nixl-lies", encoding=StoredEncoding(ZSTD))
        core = client._core  # pyright: ignore[reportPrivateUsage]
        put, payload = encoded_payload(bucket.name, numbers(6))
        put = replace(put, transport=TransportChoice.NIXL)
        for position in (0, 20, 64, 100, len(payload) // 2):
            lie = bytearray(payload)
            lie[position] ^= 0x41
            with pytest.raises(InvalidRequest, match="payload: ") as caught:
                put_parts(core, put, [memoryview(lie)])
            assert caught.value.code == "BadDigest"
        assert objects_of(server, bucket.name) == {}
        assert put_parts(core, put, [memoryview(payload)]).stored == CHUNKS


def test_a_cut_payload_stores_nothing(server: RunningServer, client: Client) -> None:
    bucket = bucket_of(server, client, "cut", encoding=StoredEncoding(ZSTD)).name
    data = numbers(7)
    _, payload = encoded_payload(bucket, data)
    head = msgspec.msgpack.encode(wire_of(payload))
    body = len(head).to_bytes(4, "big") + head + payload
    path = f"/{bucket}?kv-put"
    for kept in (len(head) + 4, len(head) + 34, len(head) + 4 + 64, len(body) // 2, len(body) - 1):
        headers = signed_headers(server, "POST", path, body, {"Content-Length": str(len(body))})
        with open_socket(server) as connection:
            send_head(connection, "POST", path, headers)
            connection.sendall(body[:kept])
    goes_on(Sender(server, bucket), payload, data)


def test_a_payload_of_another_length_in_a_body_that_announces_none_is_told_by_numbers(
    server: RunningServer, client: Client
) -> None:
    bucket = bucket_of(server, client, "unannounced", encoding=StoredEncoding(ZSTD)).name
    data = numbers(12)
    _, payload = encoded_payload(bucket, data)
    head = msgspec.msgpack.encode(wire_of(payload))
    path = f"/{bucket}?kv-put"
    for come_bytes, word in (
        (-len(head), "less than it must have: 4 bytes of length and the descriptor;"),
        (0, f"less than it must have: .* a payload of {len(payload)};"),
        (len(payload) - 1, f"less than it must have: .* a payload of {len(payload)};"),
        (len(payload) + 9, f"more than it must have: .* a payload of {len(payload)};"),
    ):
        body = len(head).to_bytes(4, "big") + head + payload + bytes(9)
        body = body[: 4 + len(head) + come_bytes]
        unknown = {"Transfer-Encoding": "chunked"}
        headers = signed_headers(server, "POST", path, b"", unknown, payload_hash=UNSIGNED)
        with open_socket(server) as connection:
            send_head(connection, "POST", path, headers)
            connection.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
            answer = receive_answer(connection, "POST")
        assert (answer.status, answer.code) == (400, "IncompleteBody")
        assert re.search(word, answer.xml.findtext("Message") or ""), answer.body
    goes_on(Sender(server, bucket), payload, data)


def test_memory_that_changes_while_it_is_read_is_refused_or_stored_as_it_was_verified(
    server: RunningServer, client: Client
) -> None:
    bucket = bucket_of(server, client, "changing", encoding=StoredEncoding(ZSTD)).name
    data = numbers(10)
    _, payload = encoded_payload(bucket, data)
    generator = np.random.default_rng(11)
    ended = threading.Event()
    stored: list[list[str]] = []
    with (
        StorageClient(server.run_dir / "storage.sock") as storage,
        TargetClient(storage) as session,
    ):
        target_id, memory = session.register(len(payload))
        sender = Sender(server, bucket, memory, target_id)

        def change() -> None:
            while not ended.is_set():
                position = int(generator.integers(0, len(payload)))
                memory[position] = payload[position] ^ 1
                memory[position] = payload[position]

        changing = threading.Thread(target=change)
        changing.start()
        try:
            for number in range(40):
                keys = [f"{number}-{key}" for key in KEYS]
                answer = sender.put(wire_of(payload, chunk_keys=keys), payload)
                assert answer.status in (200, 400), answer.body
                if answer.status == 200:
                    stored.append(keys)
                else:
                    assert answer.code == "BadDigest"
        finally:
            ended.set()
            changing.join(BOUND_S)
        sender.put(wire_of(payload), payload)
    objects = objects_of(server, bucket)
    assert sorted(objects) == sorted([*KEYS, *(key for keys in stored for key in keys)])
    for keys in [KEYS, *stored]:
        assert [objects[key][0] for key in keys] == [chunk.tobytes() for chunk in data]


def test_no_other_request_takes_frames(server: RunningServer, client: Client) -> None:
    bucket = bucket_of(server, client, "other-ways", encoding=StoredEncoding(ZSTD)).name
    _, payload = encoded_payload(bucket, numbers(8))
    wire = wire_of(payload, chunk_keys=KEYS[:1])
    header = base64.urlsafe_b64encode(msgspec.msgpack.encode(wire)).rstrip(b"=").decode()
    named = {"x-objectcache-descriptor": header}
    begun = call(server, "POST", f"/{bucket}/{KEYS[0]}?uploads", b"", named)
    upload = begun.xml.findtext("{*}UploadId")
    assert call(server, "PUT", f"/{bucket}/{KEYS[0]}", payload, named).status == 400
    of_part = f"/{bucket}/{KEYS[0]}?partNumber=1&uploadId={upload}"
    part = call(server, "PUT", of_part, payload, named)
    if part.status == 200:  # bytes of an object, whatever they look like: those of no chunk here
        etag = part.headers["ETag"]
        parts = f"<Part><PartNumber>1</PartNumber><ETag>{etag}</ETag></Part>"
        document = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
        whole = call(server, "POST", f"/{bucket}/{KEYS[0]}?uploadId={upload}", document, named)
        assert whole.code not in (None, "InternalError")
    got = call(server, "GET", f"/{bucket}/{KEYS[0]}", b"", named)
    assert got.status == 400
    assert "encoded_bytes" in (got.xml.findtext("Message") or "")
    assert objects_of(server, bucket) == {}


@pytest.mark.parametrize("verification", [Verification.FULL, Verification.OFF])
def test_frames_of_several_kinds_of_the_same_bytes_at_once_are_one_chunk(
    server: RunningServer, client: Client, verification: Verification
) -> None:
    name = f"at-once-{verification.value.lower()}"
    bucket = bucket_of(
        server, client, name, encoding=StoredEncoding(ZSTD), verification=verification
    )
    data = numbers(9)
    kinds: list[tuple[str, Bytes]] = [(ZSTD, data), (DEFLATE, data), ("", data), (ZSTD, data)]
    for number in range(6):
        keys = [f"{number}-{key}" for key in KEYS]
        counts: list[tuple[int, int]] = []
        together = threading.Barrier(len(kinds))

        def put(
            encoding: str,
            chunks: Bytes,
            keys: list[str] = keys,
            together: threading.Barrier = together,
            counts: list[tuple[int, int]] = counts,
        ) -> None:
            together.wait(BOUND_S)
            result = bucket.put(keys, chunks, transport="body", encoding=encoding)
            counts.append((result.stored, result.existing))

        threads = [threading.Thread(target=put, args=kind) for kind in kinds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(BOUND_S)
            assert not thread.is_alive()
        assert sorted(counts) == [(0, CHUNKS)] * (len(kinds) - 1) + [(CHUNKS, 0)]
        stored = objects_of(server, name)
        assert [stored[key][0] for key in keys] == [chunk.tobytes() for chunk in data]
