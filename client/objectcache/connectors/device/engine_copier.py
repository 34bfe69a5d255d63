"""A copier for an engine's GPU, as the engine's configuration asks for it. Not run on a GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from objectcache.connectors.store.lossy_setting import refuse_lossy
from objectcache.gpu.calibrated_lines import read_lines, read_links
from objectcache.gpu.copier import Copier
from objectcache.gpu.cuda_device import CudaDevice
from objectcache.gpu.device import Device, Direction
from objectcache.gpu.links.checked_links import CheckedLinks
from objectcache.landing.memory_file import MemoryFile
from objectcache.landing.regions import Region, SharedRegion
from objectcache.landing.targets import SessionTarget, SharedMemoryTarget
from objectcache.payload import Bytes
from objectcache_schemas.errors import InvalidRequest, Unavailable

logger = logging.getLogger("objectcache.connectors")
_WORDS = ("off", "on")
_LINKS = ("direct", "host", "checked")


@dataclass(frozen=True, slots=True)
class GpuCopies:
    """The settings `gpu_copies`, `gpu_calibration` and `gpu_links`: whether a copier copies beside
    the engine, the file of `objectcache gpu calibrate --write` that says how, and the links that it
    copies over: those of a `Copier`, where `checked` are the links of that file, each tried again.
    """

    word: str = "off"
    calibration: str = ""
    links: str = "direct"

    def __post_init__(self) -> None:
        """Raises `InvalidRequest` naming the setting."""
        if self.word not in _WORDS:
            raise InvalidRequest(
                f"connector setting 'gpu_copies' must be one of {', '.join(_WORDS)}, got "
                f"{self.word!r}"
            )
        if not isinstance(self.calibration, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidRequest(
                f"connector setting 'gpu_calibration' must be a file's name, got "
                f"{self.calibration!r}"
            )
        if self.links not in _LINKS:
            raise InvalidRequest(
                f"connector setting 'gpu_links' must be one of {', '.join(_LINKS)}, got "
                f"{self.links!r}"
            )
        ignored = {"gpu_calibration": self.calibration != "", "gpu_links": self.links != "direct"}
        if self.word == "off" and any(ignored.values()):
            names = " and ".join(repr(name) for name, is_set in ignored.items() if is_set)
            raise InvalidRequest(
                f"connector setting 'gpu_copies' is 'off', and {names} would change nothing: set "
                "'gpu_copies' to 'on', or leave the others out"
            )
        if self.links == "checked" and not self.calibration:
            raise InvalidRequest(
                "connector setting 'gpu_links' is 'checked', and 'gpu_calibration' names no file "
                "of them: write one with 'objectcache gpu calibrate --write'"
            )

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> GpuCopies:
        """What a connector's settings say of it, taken out of them. Raises `InvalidRequest`."""
        names = {"gpu_copies": "word", "gpu_calibration": "calibration", "gpu_links": "links"}
        return cls(**{own: settings.pop(name) for name, own in names.items() if name in settings})

    def check_layers(self, encodings: Sequence[str], lossy: str) -> None:
        """Raise `InvalidRequest` where layers would be decoded or dequantised into memory of the
        engine's process, which the copier does not reach.
        """
        if self.word == "on":
            refuse_lossy(
                lossy, "the GPU does not reach the memory of dequantised layers ('gpu_copies')"
            )
        if self.word == "on" and encodings:
            raise InvalidRequest(
                "connector setting 'encodings' must be empty where 'gpu_copies' is 'on': the GPU "
                "does not reach the memory that layers are decoded into here; a fetcher (setting "
                "'fetcher') decodes into memory that it reaches, or set 'gpu_copies' to 'off'"
            )


class EngineCopier:
    """A copier, and the stream in which the engine's calls of a thread are carried out."""

    def __init__(self, copier: Copier, current_stream: Callable[[], int]) -> None:
        """`current_stream` is the calling thread's."""
        self.copier = copier
        self.current_stream = current_stream
        self._complained = False

    def enter_thread(self) -> None:
        """Called once in each thread that loads, saves or lets loads go."""
        self.copier.device.enter_thread()

    def region(self, length_bytes: int) -> Region:
        """Memory for a client's deliveries, page-locked where the device can. Raises
        `Unavailable`.
        """
        file = MemoryFile(length_bytes)
        self._lock_pages(file)
        return SharedRegion(file)

    def reachable(self, register: Callable[[int], SessionTarget]) -> Callable[[int], SessionTarget]:
        """As `register`, which makes memory that the server reads, with what lies in memory files
        page-locked.
        """

        def registered(length_bytes: int) -> SessionTarget:
            target = register(length_bytes)
            if isinstance(target, SharedMemoryTarget):
                self._lock_pages(target.file)
            return target

        return registered

    def _lock_pages(self, file: MemoryFile) -> None:
        self.enter_thread()  # whoever locks pages without a current device makes one
        try:
            self.copier.page_locked.lock_pages(file)
        except Unavailable as error:
            self._complain(error.message)

    def reaches(self, array: Bytes) -> bool:
        """Whether the device copies out of an array, and into it, by itself. The log is told of the
        first one that it does not reach.
        """
        if self.copier.page_locked.reaches(array):
            return True
        self._complain("it is not page-locked: deliveries and puts need shared memory for that")
        return False

    def _complain(self, why: str) -> None:
        if not self._complained:
            self._complained = True
            logger.warning("gpu_copies is on, and memory is copied while the engine waits: %s", why)

    def close(self) -> None:
        """End the copier; nothing is loaded or saved any more."""
        self.copier.close()

    def __repr__(self) -> str:
        return f"<EngineCopier {self.copier!r}>"


def engine_copier_of(device: Any, settings: GpuCopies) -> EngineCopier | None:
    """For the torch.device that an engine computes on; None where the setting is `off`.

    Raises `InvalidRequest` where that is no CUDA device, or the calibration is not one of it.
    """
    if settings.word == "off":
        return None
    refused = "connector setting 'gpu_copies' is 'on'"
    if device.type != "cuda":
        raise InvalidRequest(
            f"{refused}, and the engine's KV cache is on {device.type!r}: only a CUDA device "
            "copies by itself; set it to 'off'"
        )
    import torch  # pyright: ignore[reportMissingImports]

    number = torch.cuda.current_device() if device.index is None else device.index
    try:
        cuda = CudaDevice(number)
        copier = _copier_of(cuda, settings, lambda: _neighbours_of(cuda))
    except Unavailable as error:
        raise InvalidRequest(f"{refused}: {error.message}; set it to 'off'") from error
    return EngineCopier(copier, lambda: int(torch.cuda.current_stream(device).cuda_stream))


def _neighbours_of(device: CudaDevice) -> list[Device]:
    """The machine's other GPUs, as far as this process sees them."""
    count = device.cuda.device_count()
    return [CudaDevice(number) for number in range(count) if number != device.number]


def _copier_of(
    device: Device, settings: GpuCopies, neighbours: Callable[[], Sequence[Device]]
) -> Copier:
    """Raises `InvalidRequest` naming the setting, and `Unavailable`."""
    loads, saves, links = None, None, _plain_links(settings.links)
    try:
        if settings.calibration:
            file = Path(settings.calibration)
            lines = read_lines(file, device)
            loads, saves = lines[Direction.LOAD], lines[Direction.SAVE]
            if settings.links == "checked":
                links = _checked_links(file, device, neighbours())
    except InvalidRequest as error:
        raise InvalidRequest(f"connector setting 'gpu_calibration': {error.message}") from error
    return Copier(device, loads=loads, saves=saves, links=links)


def _plain_links(word: str) -> Literal["host", "direct"] | CheckedLinks:
    return "host" if word == "host" else "direct"


def _checked_links(
    file: Path, device: Device, neighbours: Sequence[Device]
) -> Literal["direct"] | CheckedLinks:
    """Those of the file that pass again; the log is told of the others."""
    links = read_links(file, device, neighbours)
    if links is None:
        logger.info("%s has no links but the GPU's own: it is copied over that", file)
        return "direct"
    for relay, why_not in links.refused.items():
        logger.warning("the link of %r is left out: %s", relay, why_not)
    logger.info("%r is copied to over its own link and %d others", device, len(links.relays))
    return links if links.relays else "direct"
