"""How long the GPU computes on a layer: as the descriptor says, by a profile, or as learned.

In this order. A profile is the file MODEL.csv of a directory, see `compute_profile`, where MODEL is
the descriptor's `model`, or else its `fingerprint`, or else that of the bucket's layout; it needs
the descriptor's `context_tokens`. Learned is what the same identity's earlier deliveries of this
shape took. A time that no layer can take is not believed, whoever says it.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from objectcache_schemas.compute_windows import WHOLE_S, WindowSource, is_computed, is_no_copy
from objectcache_schemas.descriptor import Descriptor
from objectcache_schemas.errors import NotFound
from objectcache_storage_server.scheduling.windows.compute_profile import ComputeProfile
from objectcache_storage_server.scheduling.windows.learn_windows import (
    DeliveryShape,
    LearnedWindows,
    delivery_shape,
)
from objectcache_storage_server.scheduling.windows.read_profiles import ProfileFiles


class Window(NamedTuple):
    """Seconds per layer, None where nobody knows, and who says so."""

    compute_window_s: float | None
    source: WindowSource


NO_WINDOW = Window(None, WindowSource.NONE)


class WindowFinder:
    """Finds the compute window of a delivery, and learns from what clients consume. Thread-safe."""

    def __init__(self, profiles_dir: Path) -> None:
        self._files = ProfileFiles(profiles_dir)
        self._learned = LearnedWindows()

    def find(
        self, descriptor: Descriptor, bucket: str, identity: str, fingerprint: str, chunk_count: int
    ) -> Window:
        """The window of a delivery of `chunk_count` chunks. Blocks: a profile may be read.

        `fingerprint` is the bucket's layout's, empty where it has none. Raises `NotFound` (code
        NoSuchComputeProfile) where the descriptor names a model that has no profile.
        """
        if descriptor.compute_window_s == WHOLE_S:
            return Window(None, WindowSource.WHOLE)
        window_s, source = self._said(
            descriptor, bucket, identity, fingerprint, descriptor.window_chunks(chunk_count)
        )
        if window_s is None:
            return NO_WINDOW
        layer_bytes = chunk_count * descriptor.per_layer_chunk_bytes
        # The server learns from whatever clients report, so also from those that only copy.
        is_believed = is_no_copy if source is WindowSource.LEARNED else is_computed
        if not is_believed(window_s, layer_bytes):
            return Window(None, WindowSource.DISBELIEVED)
        return Window(window_s, source)

    def _said(
        self, descriptor: Descriptor, bucket: str, identity: str, fingerprint: str, chunk_count: int
    ) -> Window:
        if descriptor.compute_window_s is not None:
            return Window(descriptor.compute_window_s, WindowSource.DESCRIPTOR)
        profile = self._profile(descriptor, fingerprint)
        if profile is not None and descriptor.context_tokens is not None:
            cached_tokens = chunk_count * descriptor.chunk_tokens
            if descriptor.computed_tokens is not None:
                # Of a prompt whose rest is computed in several steps, or is in the engine already.
                cached_tokens = max(0, descriptor.context_tokens - descriptor.computed_tokens)
            measured_s = profile.window_s(descriptor.context_tokens, cached_tokens)
            return Window(measured_s, WindowSource.PROFILE)
        window_s = self._learned.window_s(identity, shape_of(descriptor, bucket, chunk_count))
        return Window(window_s, WindowSource.LEARNED)

    def _profile(self, descriptor: Descriptor, fingerprint: str) -> ComputeProfile | None:
        model = descriptor.model
        if model is None:
            own = descriptor.fingerprint
            found = None if own is None else self._files.find(own)
            return found or self._files.find(fingerprint)
        profile = self._files.find(model)
        if profile is None:
            raise NotFound(
                f"model {model!r} has no compute profile: there is no usable file {model}.csv in "
                "the storage server's scheduler.profiles_dir (by default DATA_DIR/profiles). Put "
                "one there, with the columns of docs/scheduling.md, or give compute_window_s "
                "instead; the server's log says why a file is not used",
                code="NoSuchComputeProfile",
            )
        return profile

    def learn(self, identity: str, shape: DeliveryShape, compute_s: float) -> None:
        """A client computed this long on one layer of a delivery of this shape, see `shape_of`."""
        self._learned.learn(identity, shape, compute_s)

    def __repr__(self) -> str:
        return f"<WindowFinder {self._files!r}, {self._learned!r}>"


def shape_of(descriptor: Descriptor, bucket: str, chunk_count: int) -> DeliveryShape:
    """The shape of a delivery of `chunk_count` chunks, all that the engine gets; holds little of
    the descriptor.
    """
    cached_tokens = chunk_count * descriptor.chunk_tokens
    computed_tokens = descriptor.computed_tokens
    if computed_tokens is None and descriptor.context_tokens is not None:
        computed_tokens = max(1, descriptor.context_tokens - cached_tokens)
    return delivery_shape(
        bucket,
        descriptor.fingerprint or "",
        descriptor.num_layers,
        cached_tokens,
        computed_tokens,
    )
