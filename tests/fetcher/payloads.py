"""Encoded payloads of several codecs, as they land, and the memory that they are decoded into."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from objectcache.landing.memory_file import MemoryFile
from objectcache_encodings.encoder import SliceEncoder
from objectcache_encodings.frames import SliceCodec, pack_row
from objectcache_encodings.payload_directory import PayloadDirectory, PayloadRun
from objectcache_relay.decoding.jobs import cut_rows
from objectcache_relay.decoding.worker_pool import JobFailure, PoolJob, WorkerPool
from objectcache_relay.landing.landed_rows import encoded_rows

Bytes = npt.NDArray[np.uint8]
ENCODING = {SliceCodec.PLANES_ZSTD: "planes-zstd", SliceCodec.PLANES_DEFLATE: "planes-deflate"}
MIXED = (
    (3, SliceCodec.PLANES_ZSTD),
    (2, SliceCodec.PLAIN),
    (4, SliceCodec.PLANES_DEFLATE),
    (5, SliceCodec.PLANES_ZSTD),
)


def bfloat16s(*shape: int) -> Bytes:
    """Numbers such as KV cache has, their last axis in bytes."""
    numbers = np.random.default_rng(11).standard_normal((*shape[:-1], shape[-1] // 2), np.float32)
    return np.ascontiguousarray((numbers.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8)


@dataclass
class LandedPayload:
    """`slices` are uint8[layers, chunks, slice_bytes]."""

    slices: Bytes
    directory: PayloadDirectory
    file: MemoryFile

    @classmethod
    def of(
        cls,
        runs: Sequence[tuple[int, SliceCodec]] = MIXED,
        layers: int = 3,
        slice_bytes: int = 48 << 10,
    ) -> LandedPayload:
        """A payload of runs of chunks, each in its encoding."""
        slices = bfloat16s(layers, sum(count for count, _ in runs), slice_bytes)
        rows: list[list[Bytes]] = []
        for layer in slices:
            first = 0
            of_layer: list[Bytes] = []
            for count, codec in runs:
                some = layer[first : first + count]
                if codec is not SliceCodec.PLAIN:
                    some = pack_row(SliceEncoder(ENCODING[codec], 2).encode_slices(some))
                of_layer.append(some)
                first += count
            rows.append(of_layer)
        directory = PayloadDirectory(
            tuple(
                PayloadRun(count, codec, tuple(layer[number].shape[1] for layer in rows))
                for number, (count, codec) in enumerate(runs)
            ),
            slice_bytes,
        )
        wire = b"".join([directory.to_bytes(), *(row.tobytes() for layer in rows for row in layer)])
        assert len(wire) == directory.payload_bytes
        file = MemoryFile(len(wire))
        file.array()[:] = np.frombuffer(wire, np.uint8)
        return cls(slices, directory, file)

    @property
    def layer_bytes(self) -> int:
        """Decoded."""
        length: int = self.slices[0].nbytes
        return length


class DecodedInto:
    """What jobs of a payload are to fill, and how they ended."""

    def __init__(
        self,
        pool: WorkerPool,
        landed: LandedPayload,
        may_begin: Callable[[], None] = lambda: None,
    ) -> None:
        self._pool, self._landed, self._may_begin = pool, landed, may_begin
        self.file = MemoryFile(landed.slices.nbytes)
        self.ended: list[JobFailure | None] = []
        self.asked = 0

    def submit(self, layer: int) -> None:
        """Have a layer decoded."""
        landed, pool = self._landed, self._pool
        source = pool.share(landed.file, landed.file.fd, landed.file.length_bytes, is_target=False)
        target = pool.share(self.file, self.file.fd, self.file.length_bytes, is_target=True)
        begin = layer * landed.layer_bytes
        rows = list(encoded_rows(landed.directory, begin, landed.layer_bytes))
        jobs = [
            PoolJob(
                part.job(pool.next_number(), source.number, target.number, begin),
                (source, target),
                self._may_begin,
                self.ended.append,
            )
            for part in cut_rows(rows, pool.workers)
        ]
        self.asked += len(jobs)
        pool.submit(jobs)

    @property
    def is_over(self) -> bool:
        """Whether all jobs have ended."""
        return len(self.ended) == self.asked

    @property
    def slices(self) -> Bytes:
        """What is there."""
        return self.file.array().reshape(self._landed.slices.shape)

    @property
    def failures(self) -> list[JobFailure]:
        """Of the jobs that were not done."""
        return [failure for failure in self.ended if failure is not None]
