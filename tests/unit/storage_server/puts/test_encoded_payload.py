"""A put's payload of frames, as it arrives: in any pieces, damaged anywhere, or a bomb."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objectcache_encodings import SliceCodec, SliceEncoder, pack_row
from objectcache_encodings.frames import slice_checksums
from objectcache_encodings.payload_directory import PayloadDirectory, PayloadRun
from objectcache_schemas.errors import InvalidRequest, ObjectCacheError
from objectcache_schemas.limits import KIB, MIB
from objectcache_schemas.records import BucketPolicy, Condition, StoredEncoding, Verification
from objectcache_storage_server.engines.base import Engine, PrefixShape, StagedPut
from objectcache_storage_server.engines.local.engine import LocalEngine
from objectcache_storage_server.engines.memory.engine import MemoryEngine
from objectcache_storage_server.engines.puts.put_buffers import Bytes
from objectcache_storage_server.puts.encoded_payload import EncodedPayload
from tests.contract.engine_suite import BUCKET, read
from tests.contract.opened_engines.local_engines import small_local_engine
from tests.unit.encodings.kv_numbers import kv_slices
from tests.unit.encodings.put_payloads import put_payload_of, put_payload_of_frames
from tests.unit.examples import examples

LAYERS, SLICE_BYTES, CHUNKS = 3, 4 * KIB, 7  # of more than one extent of the small engine
KEYS = tuple(f"k{number}" for number in range(CHUNKS))
ENCODINGS = ("planes-zstd", "planes-deflate")


def layers_of(seed: int, slice_bytes: int = SLICE_BYTES) -> Bytes:
    """uint8[layers, chunks, slice_bytes]; a slice of the second layer does not shrink."""
    data = kv_slices(LAYERS * CHUNKS, slice_bytes, 2, seed).reshape(LAYERS, CHUNKS, slice_bytes)
    data = data.copy()
    data[1, 2] = kv_slices(1, slice_bytes, 1, seed)[0]
    return data


def shape_of(payload: bytes, slice_bytes: int = SLICE_BYTES) -> PrefixShape:
    return PrefixShape(KEYS, LAYERS, slice_bytes, layerwise=True, encoded_bytes=len(payload))


def put_payload(engine: Engine, payload: bytes, ends: list[int], *, copies: bool = False) -> None:
    shape = shape_of(payload)
    prefix = engine.stage_prefix(BUCKET.name, shape)
    try:
        sink = EncodedPayload(prefix, shape, copies=copies)
        begin = 0
        for end in [*sorted(ends), len(payload)]:
            sink.write(begin, memoryview(payload)[begin:end])
            begin = end
        puts = [StagedPut(staged, "") for staged in prefix.staged]
        engine.commit(puts, Condition(immutable=True))
    finally:
        prefix.discard()


def local_engine(path: Path, **policy: object) -> LocalEngine:
    engine = small_local_engine(path / "data")
    engine.create_bucket(BUCKET)
    engine.set_policy(BUCKET.name, BucketPolicy(**policy))  # type: ignore[arg-type]
    return engine


ENCODED = StoredEncoding.PLANES_ZSTD


@pytest.fixture(params=["memory", "plain", "zstd", "deflate", "sampled", "off"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    opened: Engine
    if request.param == "memory":
        opened = MemoryEngine()
        opened.create_bucket(BUCKET)
    elif request.param in ("sampled", "off"):
        verification = Verification(request.param)
        opened = local_engine(tmp_path, encoding=ENCODED, verification=verification)
    else:
        encoding = None if request.param == "plain" else StoredEncoding(f"planes-{request.param}")
        opened = local_engine(tmp_path, encoding=encoding)
    yield opened
    opened.close()


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("copies", [False, True])
def test_chunks_are_what_was_encoded_however_the_payload_is_cut(
    engine: Engine, encoding: str, copies: bool
) -> None:
    for seed in range(8):
        layers = layers_of(seed)
        payload = put_payload_of(layers, encoding)
        ends = np.random.default_rng(seed).integers(0, len(payload), 3 ** (seed // 2)).tolist()
        put_payload(engine, payload, ends, copies=copies)
        for chunk, key in enumerate(KEYS):
            assert read(engine, key) == layers[:, chunk].tobytes()
        engine.delete(BUCKET.name, KEYS)


@pytest.mark.parametrize("verification", list(Verification))
def test_every_changed_byte_is_found_and_stores_nothing(
    tmp_path: Path, verification: Verification
) -> None:
    engine = local_engine(tmp_path, encoding=ENCODED, verification=verification)
    payload = put_payload_of(layers_of(1))
    generator = np.random.default_rng(2)
    for where in [*range(200), *generator.integers(200, len(payload), examples(300)).tolist()]:
        damaged = bytearray(payload)
        damaged[where] ^= int(generator.integers(1, 256))
        with pytest.raises(InvalidRequest, match="payload: "):
            put_payload(engine, bytes(damaged), [])
        assert engine.match(BUCKET.name, KEYS) == 0
    put_payload(engine, payload, [])
    engine.close()


@pytest.mark.parametrize("verification", list(Verification))
def test_frames_that_state_other_slices_take_no_key_from_these(
    tmp_path: Path, verification: Verification
) -> None:
    """Chunks are known by the checksums of their slices, which frames state."""
    engine = local_engine(tmp_path, encoding=ENCODED, verification=verification)
    layers = layers_of(1)
    forged = [SliceEncoder().encode_slices(layer) for layer in layers_of(2)]
    for layer, frames in enumerate(forged):
        stated = slice_checksums(pack_row(SliceEncoder().encode_slices(layers[layer])))
        forged[layer] = [
            frame[:8] + checksum.to_bytes(8, "little") + frame[16:]
            for frame, checksum in zip(frames, stated, strict=True)
        ]
    with pytest.raises(InvalidRequest, match=r"layer 0 of chunk_keys\[0\] \('k0'\)") as caught:
        put_payload(engine, put_payload_of_frames(forged, SLICE_BYTES), [])
    assert caught.value.code == "BadDigest"
    assert engine.match(BUCKET.name, KEYS) == 0
    put_payload(engine, put_payload_of(layers), [])
    for chunk, key in enumerate(KEYS):
        assert read(engine, key) == layers[:, chunk].tobytes()
    engine.close()


@given(st.binary(max_size=400), st.booleans())
@settings(max_examples=examples(100), deadline=None)
def test_no_payload_breaks_it(noise: bytes, begins_well: bool) -> None:
    engine = MemoryEngine()
    engine.create_bucket(BUCKET)
    payload = put_payload_of(layers_of(1))
    begin = payload[:64] if begins_well else b""
    hostile = (begin + noise).ljust(len(payload), b"\0")
    with pytest.raises(ObjectCacheError):
        put_payload(engine, hostile, [])
    engine.close()


def test_frames_of_next_to_nothing_take_no_more_memory_than_others(tmp_path: Path) -> None:
    """Slices of zeros are frames of 64 bytes: a piece of the payload would be 32 GiB of slices."""
    engine = local_engine(tmp_path)
    slice_bytes, keys = MIB, tuple(str(number) for number in range(40))
    frame = SliceEncoder(element_bytes=1).encode_slice(bytes(slice_bytes))
    row = pack_row([frame] * len(keys))
    directory = PayloadDirectory(
        (PayloadRun(len(keys), SliceCodec.PLANES_ZSTD, (row.shape[1],)),), slice_bytes
    )
    payload = directory.to_bytes() + row.tobytes()
    shape = PrefixShape(keys, 1, slice_bytes, layerwise=True, encoded_bytes=len(payload))
    prefix = engine.stage_prefix(BUCKET.name, shape)
    sink = EncodedPayload(prefix, shape, copies=False)
    tracemalloc.start()
    try:
        sink.write(0, memoryview(payload))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        prefix.discard()
        engine.close()
    assert peak_bytes < 12 * MIB


def test_a_directory_of_several_runs_or_of_plain_slices_is_refused() -> None:
    engine = MemoryEngine()
    engine.create_bucket(BUCKET)
    layers = layers_of(1)
    whole = put_payload_of(layers)
    pitches = (SLICE_BYTES,) * LAYERS
    for runs, what in (
        ((PayloadRun(CHUNKS, SliceCodec.PLAIN, pitches),), "no chunk is encoded"),
        (
            (
                PayloadRun(3, SliceCodec.PLANES_ZSTD, pitches),
                PayloadRun(CHUNKS - 3, SliceCodec.PLANES_ZSTD, pitches),
            ),
            "that of a put has one run of all chunks",
        ),
        ((PayloadRun(CHUNKS, SliceCodec.PLANES_ZSTD, pitches),), "by the directory of the payload"),
    ):
        directory = PayloadDirectory(runs, SLICE_BYTES).to_bytes()
        with pytest.raises(InvalidRequest, match=what):
            put_payload(engine, directory.ljust(len(whole), b"\0"), [])
    engine.close()
