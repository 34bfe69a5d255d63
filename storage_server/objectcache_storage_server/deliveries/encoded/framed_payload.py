"""Which chunks of a prefix are sent as the frames that they are stored as. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from objectcache_encodings.frames import ENCODINGS, SliceCodec
from objectcache_encodings.payload_directory import PayloadDirectory, PayloadRun
from objectcache_schemas.descriptor import Descriptor
from objectcache_storage_server.engines.base import FramePlace, FrameRows, Placement


@dataclass(slots=True)
class FramedRun:
    """Neighbours in a prefix: frames of `rows` from `first_slot` on, or plain slices, which may lie
    anywhere.
    """

    first_chunk: int
    end_chunk: int
    rows: FrameRows | None
    first_slot: int = 0

    def takes(self, chunk: int, rows: FrameRows | None, slot: int) -> bool:
        """Take the next chunk, if it belongs here."""
        if rows is not self.rows:
            return False
        if rows is not None and slot != self.first_slot + chunk - self.first_chunk:
            return False
        self.end_chunk = chunk + 1
        return True


@dataclass(frozen=True)
class FramedPayload:
    """A layerwise payload in which some chunks are frames."""

    runs: Sequence[FramedRun]
    slice_bytes: int
    first_layer: int
    end_layer: int

    @cached_property
    def directory(self) -> PayloadDirectory:
        """Where everything lies in it."""
        return PayloadDirectory(tuple(self._run(run) for run in self.runs), self.slice_bytes)

    @cached_property
    def directory_data(self) -> bytes:
        """The directory as it is sent."""
        return self.directory.to_bytes()

    def _run(self, run: FramedRun) -> PayloadRun:
        chunk_count = run.end_chunk - run.first_chunk
        if run.rows is None:
            pitches = (self.slice_bytes,) * (self.end_layer - self.first_layer)
            return PayloadRun(chunk_count, SliceCodec.PLAIN, pitches)
        pitches = run.rows.pitches[self.first_layer : self.end_layer]
        return PayloadRun(chunk_count, run.rows.codec, pitches)

    @property
    def layer_bytes(self) -> int:
        """Bytes of a layer in the mean, at least."""
        return self.directory.payload_bytes // self.directory.layer_count

    @cached_property
    def slice_bytes_max(self) -> int:
        """The longest slice or frame, which is read whole."""
        return max(max(run.pitches) for run in self.directory.runs)


def framed_payload(
    descriptor: Descriptor,
    places: Sequence[FramePlace | None] | None,
    placements: Sequence[Placement],
) -> FramedPayload | None:
    """The payload of chunks that lie at these places, their slices at these placements; None where
    it has no fewer bytes than the plain one, its reader takes nothing that is stored, or asks for
    slices of another size than some that are stored, which only the plain one converts. Chunks
    whose frames are longer than their slices are plain in it, and so are those in other encodings.
    """
    if places is None or not descriptor.encodings:
        return None
    if any(place.slice_bytes not in (0, descriptor.per_layer_chunk_bytes) for place in placements):
        return None
    codecs = {ENCODINGS[name] for name in descriptor.encodings if name in ENCODINGS}
    first_layer, end_layer = descriptor.first_layer, descriptor.end_layer
    plain_bytes = (end_layer - first_layer) * descriptor.per_layer_chunk_bytes

    def wanted(rows: FrameRows) -> bool:
        is_alike = rows.codec in codecs and len(rows.pitches) == descriptor.num_layers
        return is_alike and sum(rows.pitches[first_layer:end_layer]) < plain_bytes

    runs = _runs(places, {id(rows) for rows in _distinct(places) if wanted(rows)})
    if all(run.rows is None for run in runs):
        return None
    payload = FramedPayload(runs, descriptor.per_layer_chunk_bytes, first_layer, end_layer)
    if payload.directory.payload_bytes >= payload.directory.decoded_bytes:
        return None
    assert payload.directory_data  # made here: the caller is no event loop, which asks for it later
    return payload


def _distinct(places: Sequence[FramePlace | None]) -> list[FrameRows]:
    return list({id(place.rows): place.rows for place in places if place is not None}.values())


def _runs(places: Sequence[FramePlace | None], wanted: Collection[int]) -> list[FramedRun]:
    runs: list[FramedRun] = []
    for chunk, place in enumerate(places):
        is_framed = place is not None and id(place.rows) in wanted
        rows, slot = (place.rows, place.slot) if place is not None and is_framed else (None, 0)
        if not (runs and runs[-1].takes(chunk, rows, slot)):
            runs.append(FramedRun(chunk, chunk + 1, rows, slot))
    return runs
