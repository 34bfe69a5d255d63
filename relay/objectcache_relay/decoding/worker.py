"""`python -m objectcache_relay.decoding.worker SOCKET PARENT CPU`: one of a fetcher's workers.

It decodes rows of landing memory, one job after the other: into engines' memory, or into the
fetcher's decoded regions, from which a fabric or a body takes them on. SIGTERM and SIGINT,
which a group of processes is sent, are its parent's business: that drains first.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import sys
import time
from collections import OrderedDict

import msgspec
import numpy as np
import numpy.typing as npt

from objectcache_encodings.decoder import SliceDecoder
from objectcache_encodings.frames import SliceCodec
from objectcache_encodings.lossy import LossyDtype, dtype_of_text
from objectcache_relay.decoding.jobs import (
    MESSAGE_BYTES_MAX,
    WORKER_MESSAGES,
    DecodeJob,
    FileChanged,
    JobEnded,
    JobRow,
    MapFile,
    UnmapFile,
    WorkerReady,
)
from objectcache_schemas.errors import DamagedData, InvalidRequest

_PR_SET_PDEATHSIG = 1
_ERROR_CHARACTERS_MAX = 500
LOSSY_MAX = 16  # dtypes that are known at a time: an engine has one, or two for drafts

Bytes = npt.NDArray[np.uint8]
Damage = tuple[int, str, bool]  # of which slice, what, and whether it is stored so


class SliceWorker:
    """Carries out what comes over a socket of packets."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._files: dict[int, Bytes] = {}
        self._decoder = SliceDecoder()
        self._lossy = OrderedDict[str, LossyDtype]()  # by `dtype_text`, the last used last

    def run(self) -> None:
        """Until the other end closes."""
        encoder = msgspec.msgpack.Encoder()
        self._control.send(encoder.encode(WorkerReady()))
        while True:
            data, descriptors, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES_MAX, 1)
            if not data:
                return
            message: MapFile | UnmapFile | DecodeJob = WORKER_MESSAGES.decode(data)
            answer: JobEnded | FileChanged
            match message:
                case DecodeJob():
                    begun_s = time.monotonic()
                    ended = self._decode(message)
                    took_s = time.monotonic() - begun_s
                    answer = msgspec.structs.replace(ended, took_s=took_s)
                case MapFile():
                    self._files[message.file] = _mapped(message, descriptors[0])
                    answer = FileChanged(message.file)
                case UnmapFile():
                    self._files.pop(message.file, None)
                    answer = FileChanged(message.file)
            self._control.send(encoder.encode(answer))

    def _decode(self, job: DecodeJob) -> JobEnded:
        source, target = self._files[job.source], self._files[job.target]
        place_bytes, slices_before = job.target_offset_bytes, 0
        for row in job.rows:
            end = row.source_offset_bytes + row.count * row.pitch_bytes
            frames = source[row.source_offset_bytes : end].reshape(row.count, -1)
            lossy = self.dtype(job.lossy)
            slice_bytes = row.slice_bytes if lossy is None else lossy.shape.slice_bytes
            end = place_bytes + row.count * slice_bytes
            slices = target[place_bytes:end].reshape(row.count, -1)
            damage = (
                self._decode_row(row, frames, slices)
                if lossy is None
                else self._dequantise_row(row, frames, slices, lossy, job.layer)
            )
            if damage:
                index, error, is_stored_so = damage
                error = error[:_ERROR_CHARACTERS_MAX]
                return JobEnded(job.number, error, slices_before + index, is_stored_so)
            place_bytes, slices_before = end, slices_before + row.count
        return JobEnded(job.number)

    def dtype(self, text: str) -> LossyDtype | None:
        """The dtype that `dtype_text` wrote; None of no text."""
        if not text:
            return None
        known = self._lossy.get(text)
        if known is None:
            known = self._lossy[text] = dtype_of_text(text, "lossy")
        self._lossy.move_to_end(text)
        if len(self._lossy) > LOSSY_MAX:
            self._lossy.popitem(last=False)
        return known

    def _dequantise_row(
        self, row: JobRow, frames: Bytes, slices: Bytes, lossy: LossyDtype, layer: int
    ) -> Damage | None:
        """See `_decode_row`; slice by slice, of which the decoded one stays in the cache. One that
        is not encoded is dequantised from where it landed.
        """
        is_plain = row.codec == SliceCodec.PLAIN
        decoded = np.empty((0 if is_plain else 1, row.slice_bytes), np.uint8)
        for index in range(row.count):
            stored = frames[index : index + 1]
            if not is_plain:
                if damage := self._decode_row(row, stored, decoded):
                    return index, *damage[1:]
                stored = decoded
            try:
                lossy.dequantise(stored, layer, slices[index : index + 1])
            except DamagedData as error:
                return index, error.message, True
        return None

    def _decode_row(self, row: JobRow, frames: Bytes, slices: Bytes) -> Damage | None:
        """Which slice could not be decoded, and why."""
        if row.codec == SliceCodec.PLAIN:
            np.copyto(slices, frames)
            return None
        try:
            self._decoder.decode_row(frames, slices)
        except (DamagedData, InvalidRequest):
            return self._first_damage(frames, slices)
        return None

    def _first_damage(self, frames: Bytes, slices: Bytes) -> Damage:
        for index in range(len(frames)):
            try:
                self._decoder.decode_row(frames[index : index + 1], slices[index : index + 1])
            except (DamagedData, InvalidRequest) as error:
                return index, error.message, False
        return 0, "the row was changed while it was decoded", False


def _mapped(message: MapFile, descriptor: int) -> Bytes:
    """The file, with its pages in this process' tables: the first touch of each would cost as much
    as a tenth of decoding it.
    """
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    access = mmap.PROT_READ | (mmap.PROT_WRITE if message.is_target else 0)
    try:
        return np.frombuffer(mmap.mmap(descriptor, message.length_bytes, flags, access), np.uint8)
    finally:
        os.close(descriptor)


def end_with_parent(parent: int) -> None:
    """Be killed when the parent ends, in whatever way: nothing is written for nobody."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        sys.exit(1)


def main(arguments: list[str]) -> int:
    """Entry point; returns the exit status."""
    descriptor, parent, cpu = (int(one) for one in arguments)
    end_with_parent(parent)
    for told in (signal.SIGTERM, signal.SIGINT):
        signal.signal(told, signal.SIG_IGN)
    if cpu >= 0:
        os.sched_setaffinity(0, {cpu})
    with socket.socket(fileno=descriptor) as control:
        SliceWorker(control).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
