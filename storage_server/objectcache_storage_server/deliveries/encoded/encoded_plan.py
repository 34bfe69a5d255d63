"""The plan of a payload of frames: a directory, then layers of different lengths. Pure.

Where a frame lies is arithmetic, as where a slice does: it follows from the pitch of the frames of
its layer and run. Frames are read as they are stored. Chunks that are plain in the payload are read
as in any plan, decoded if need be.
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from objectcache_encodings.payload_directory import PayloadDirectory
from objectcache_schemas.descriptor import DeliveryMode
from objectcache_storage_server.deliveries.encoded.directory_objects import (
    DIRECTORY,
    DirectoryObjects,
)
from objectcache_storage_server.deliveries.encoded.framed_payload import FramedPayload
from objectcache_storage_server.deliveries.plan import (
    ChunkPlan,
    LayerwiseProgress,
    Plan,
    Progress,
)
from objectcache_storage_server.engines.base import OpenObjects, Placement, Read
from objectcache_storage_server.scheduling.fragments import Fragment

_run_end = operator.attrgetter("end_chunk")


@dataclass(frozen=True)
class EncodedPlan(Plan):
    """Plan of a layerwise payload in which some chunks are frames.

    `fragment_bytes` has room for any slice or frame: these are read whole.
    """

    payload: FramedPayload
    placements: Sequence[Placement]
    fragment_bytes: int

    def __post_init__(self) -> None:
        assert self.payload.slice_bytes_max <= self.fragment_bytes

    @cached_property
    def _directory(self) -> PayloadDirectory:
        return self.payload.directory

    @property
    def first_layer(self) -> int:  # type: ignore[override]
        """See `Plan`."""
        return self.payload.first_layer

    @property
    def end_layer(self) -> int:  # type: ignore[override]
        """See `Plan`."""
        return self.payload.end_layer

    @property
    def payload_bytes(self) -> int:  # type: ignore[override]
        """The directory and all layers."""
        return self._directory.payload_bytes

    @property
    def directory_bytes(self) -> int:
        """See `Plan.directory_bytes`."""
        return self._directory.directory_bytes

    @property
    def decoded_bytes(self) -> int:
        """See `Plan.decoded_bytes`."""
        return self._directory.decoded_bytes

    @property
    def layers_bytes(self) -> Sequence[int]:
        """See `Plan.layers_bytes`."""
        offsets = (0, *self._directory.layer_offsets[1:])
        return [end - begin for begin, end in pairwise(offsets)]

    def reading(self, opened: OpenObjects) -> OpenObjects:
        """See `Plan.reading`."""
        return DirectoryObjects(opened, self.payload.directory_data)

    def fragments(self) -> Iterator[Fragment]:
        """See `Plan.fragments`. None spans two layers; the first ones begin with the directory."""
        offset_bytes = 0
        for layer in range(self._directory.layer_count):
            lead_bytes = 0 if layer else self.directory_bytes
            number = self.first_layer + layer
            for length_bytes, first, end in self._pieces(layer, lead_bytes):
                yield Fragment(offset_bytes, length_bytes, first, end, number, number + 1)
                offset_bytes += length_bytes

    def _pieces(self, layer: int, length_bytes: int) -> Iterator[tuple[int, int, int]]:
        """Length, first and end chunk of each fragment of a layer, before which there are
        `length_bytes`: whole runs as far as they fit.
        """
        most_bytes = self.fragment_bytes
        first = end = 0
        while length_bytes > most_bytes:
            yield most_bytes, first, end
            length_bytes -= most_bytes
        for row in self._directory.rows(layer):
            pitch, row_end = row.pitch_bytes, row.first_chunk + row.chunk_count
            if end > first and length_bytes + row.chunk_count * pitch > most_bytes:
                yield length_bytes, first, end
                length_bytes, first = 0, end
            while end < row_end:
                count = min(row_end - end, (most_bytes - length_bytes) // pitch)
                if count == 0:
                    yield length_bytes, first, end
                    length_bytes, first = 0, end
                end += count
                length_bytes += count * pitch
        yield length_bytes, first, end

    @cached_property
    def _plain(self) -> ChunkPlan:
        """The same chunks as slices, for the reads of those that are sent so."""
        return ChunkPlan(
            self.placements,
            self.payload.slice_bytes,
            self.first_layer,
            self.end_layer,
            DeliveryMode.LAYERWISE,
            self.fragment_bytes,
        )

    def reads(self, fragment: Fragment) -> list[Read]:
        """See `Plan.reads`. Those of the directory are of the source `DIRECTORY`."""
        runs, layer = self.payload.runs, fragment.first_layer
        reads: list[Read] = []
        landing_bytes = min(self.directory_bytes - fragment.offset_bytes, fragment.length_bytes)
        if landing_bytes > 0:
            reads.append(Read(DIRECTORY, fragment.offset_bytes, landing_bytes, 0))
        landing_bytes = max(0, landing_bytes)
        chunk = fragment.first_chunk
        number = bisect.bisect_right(runs, chunk, key=_run_end)
        while chunk < fragment.end_chunk:
            run = runs[number]
            end = min(run.end_chunk, fragment.end_chunk)
            if run.rows is None:
                reads += self._slice_reads(layer, chunk, end, landing_bytes)
                landing_bytes += (end - chunk) * self.payload.slice_bytes
            else:
                pitch = run.rows.pitches[layer]
                slot = run.first_slot + chunk - run.first_chunk
                begin_bytes = run.rows.offsets[layer] + slot * pitch
                length_bytes = (end - chunk) * pitch
                reads.append(Read(run.rows.source, begin_bytes, length_bytes, landing_bytes))
                landing_bytes += length_bytes
            chunk, number = end, number + 1
        return reads

    def _slice_reads(self, layer: int, first: int, end: int, landing_bytes: int) -> Iterator[Read]:
        length_bytes = (end - first) * self.payload.slice_bytes
        for read in self._plain.reads(Fragment(0, length_bytes, first, end, layer, layer + 1)):
            landing = read.landing_offset_bytes + landing_bytes
            yield read._replace(landing_offset_bytes=landing)

    def progress(self) -> Progress:
        """See `Plan.progress`. The directory counts to the first layer."""
        return LayerwiseProgress(self.layers_bytes, self.first_layer)
