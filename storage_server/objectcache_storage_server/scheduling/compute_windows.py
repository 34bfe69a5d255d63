"""How long the GPU computes on a layer: as the descriptor says, by a profile, or as learned.

In this order. A profile is the file MODEL.csv of a directory, see `compute_profile`, where MODEL is
the descriptor's `model`, or else the fingerprint of the bucket's layout; it needs the descriptor's
`context_tokens`. Learned is what the same identity's earlier deliveries of this shape took.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from objectcache_schemas.descriptor import Descriptor
from objectcache_schemas.errors import NotFound
from objectcache_schemas.messages import WindowSource
from objectcache_storage_server.scheduling.compute_profile import ComputeProfile
from objectcache_storage_server.scheduling.learned_windows import (
    DeliveryShape,
    LearnedWindows,
    delivery_shape,
)
from objectcache_storage_server.scheduling.profile_files import ProfileFiles


class Window(NamedTuple):
    """Seconds per layer, None where nobody knows, and who says so."""

    compute_window_s: float | None
    source: WindowSource


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
        if descriptor.compute_window_s is not None:
            return Window(descriptor.compute_window_s, WindowSource.DESCRIPTOR)
        profile = self._profile(descriptor.model, fingerprint)
        if profile is not None and descriptor.context_tokens is not None:
            cached_tokens = chunk_count * descriptor.chunk_tokens
            measured_s = profile.window_s(descriptor.context_tokens, cached_tokens)
            return Window(measured_s, WindowSource.PROFILE)
        window_s = self._learned.window_s(identity, shape_of(descriptor, bucket, chunk_count))
        return Window(window_s, WindowSource.NONE if window_s is None else WindowSource.LEARNED)

    def _profile(self, model: str | None, fingerprint: str) -> ComputeProfile | None:
        if model is None:
            return self._files.find(fingerprint)
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
    """The shape of a delivery of `chunk_count` chunks; holds nothing of the descriptor."""
    cached_tokens = chunk_count * descriptor.chunk_tokens
    return delivery_shape(bucket, descriptor.num_layers, cached_tokens, descriptor.context_tokens)
