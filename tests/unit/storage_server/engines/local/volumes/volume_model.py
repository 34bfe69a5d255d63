"""A volume beside plain memory: extents are written, freed, moved between the paths and read, in
any order and by either path, and every read is compared.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

from objectcache_storage_server.engines.local.volumes.volume import (
    BLOCK_BYTES,
    IoPath,
    Transfer,
    Volume,
)

SLOTS = 12
SLOT_BYTES = 12 * BLOCK_BYTES  # a place for an extent; the next one is its neighbour


class Disagreement(AssertionError):
    """A read gave something else than what was written last."""


def run_model(
    volume: Volume, seed: int, steps: int, stir: Callable[[], object] = lambda: None
) -> None:
    """Raises `Disagreement` that names the seed and the step. `stir` is called between steps."""
    model = _Model(volume, seed)
    for step in range(steps):
        model.take_step(step)
        stir()
    model.read_all(steps)


class _Model:
    def __init__(self, volume: Volume, seed: int) -> None:
        self._volume = volume
        self._seed = seed
        self._chance = random.Random(seed)
        self._stored: dict[int, bytes] = {}  # by slot: what its extent holds
        self._paths: dict[int, IoPath] = {}

    def take_step(self, step: int) -> None:
        chance = self._chance
        slot = chance.randrange(SLOTS)
        if slot not in self._stored:
            self._write(slot, chance.choice(list(IoPath)))
            return
        action = chance.choice(["free", "read", "read", "move", "prefetch", "flush", "any"])
        begin, length = slot * SLOT_BYTES, len(self._stored[slot])
        if action == "free":
            self._volume.discard(begin, SLOT_BYTES)
            del self._stored[slot]
        elif action == "move":
            self._move(slot)
        elif action == "prefetch":
            self._volume.prefetch(begin, length)
        elif action == "flush":
            self._volume.flush([(begin, length)])
        else:
            path = self._paths[slot] if action == "read" else chance.choice(list(IoPath))
            self._read(slot, path, step)

    def read_all(self, step: int) -> None:
        for slot in self._stored:
            for path in IoPath:
                self._read(slot, path, step)

    def _write(self, slot: int, path: IoPath) -> None:
        chance, begin = self._chance, slot * SLOT_BYTES
        data = chance.randbytes(chance.randrange(1, SLOT_BYTES + 1))
        cuts = sorted({0, len(data), *(chance.randrange(len(data)) for _ in range(2))})
        if path is IoPath.DIRECT:
            cuts = sorted({cut - cut % BLOCK_BYTES for cut in cuts[:-1]} | {len(data)})
        for first, last in itertools.pairwise(cuts):
            piece = memoryview(data)[first:last]
            self._volume.write([Transfer(begin + first, piece)], path)
        self._stored[slot], self._paths[slot] = data, path

    def _move(self, slot: int) -> None:
        begin = slot * SLOT_BYTES
        if self._paths[slot] is IoPath.PAGE_CACHE:
            self._paths[slot] = IoPath.DIRECT
            self._volume.drop_cache(begin, SLOT_BYTES)
        elif self._volume.enter_cache(begin, SLOT_BYTES):
            self._paths[slot] = IoPath.PAGE_CACHE

    def _read(self, slot: int, path: IoPath, step: int) -> None:
        data = self._stored[slot]
        begin = self._chance.randrange(len(data))
        length = self._chance.randrange(1, len(data) - begin + 1)
        memory = memoryview(bytearray(length))
        transfer = Transfer(slot * SLOT_BYTES + begin, memory)
        if path is IoPath.DIRECT or not self._volume.read_resident(transfer):
            self._volume.read([transfer], path)
        if bytes(memory) != data[begin : begin + length]:
            raise Disagreement(
                f"seed {self._seed}, step {step}: slot {slot} read by {path.name} at {begin}"
            )
