"""The local engine in small: settings under which a few chunks make several extents and files."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from objectcache_encodings import ENCODINGS
from objectcache_runtime.settings import StorageSettings
from objectcache_schemas.limits import KIB, MIB
from objectcache_schemas.records import BucketInfo
from objectcache_storage_server.engines.local.engine import LocalEngine
from objectcache_storage_server.engines.local.puts.encode_extents import RowEncoder, row_encoder
from objectcache_storage_server.engines.local.volumes.nvme_volume import NvmeVolume
from objectcache_storage_server.engines.open_engine import open_local_engine, open_volume
from tests.hardware.nvme_namespaces import wipe
from tests.unit.storage_server.engines.local.emulated_block_device import EmulatedBlockDevice
from tests.unit.storage_server.engines.local.emulated_nvme import EmulatedNvme

SMALL = StorageSettings(
    data_file_bytes=8 * MIB,
    extent_row_bytes=16 * KIB,
    extent_bytes_max=1 * MIB,
    capacity_bytes=256 * MIB,
    capacity_reserve_bytes=0,
    index_bytes_max=256 * MIB,
    put_buffer_bytes_max=4 * MIB,
    compaction_bytes_per_s=0,
)
NVME_BYTES = 33 * MIB  # four segments beside the superblock


def small_local_engine(
    folder: Path, *, clock: Callable[[], float] = time.time, **changes: object
) -> LocalEngine:
    """The local engine in `folder` with `SMALL` settings, some of them changed."""
    return open_local_engine(folder, msgspec.structs.replace(SMALL, **changes), clock)


class EncodingLocalEngine(LocalEngine):
    """Stores the chunks of every bucket encoded, as if each had such a policy."""

    @staticmethod
    def row_encoder(bucket: BucketInfo) -> RowEncoder | None:
        return row_encoder(bucket) or RowEncoder("planes-zstd", 2)


class FickleLocalEngine(LocalEngine):
    """The policy of every bucket has another encoding, or none, each time that it is looked at: so
    there is always something for upkeep to encode, and to decode again.
    """

    @staticmethod
    def row_encoder(bucket: BucketInfo) -> RowEncoder | None:
        encoding = random.choice([None, *ENCODINGS])
        return None if encoding is None else RowEncoder(encoding, 2)


def encoding_local_engine(
    folder: Path, *, clock: Callable[[], float] = time.time, **changes: object
) -> LocalEngine:
    """`small_local_engine`, whose extents with several slots all hold frames."""
    return EncodingLocalEngine(
        folder, msgspec.structs.replace(SMALL, **changes), open_volume, clock
    )


def nvme_local_engine(
    folder: Path,
    device: EmulatedNvme | None = None,
    block_device: EmulatedBlockDevice | None = None,
    *,
    clock: Callable[[], float] = time.time,
    **changes: object,
) -> LocalEngine:
    """The local engine on an emulated namespace; without a block device it has the direct path
    alone.
    """
    device = device or EmulatedNvme(NVME_BYTES)

    def open_volume(data_dir: Path, settings: StorageSettings) -> NvmeVolume:
        return NvmeVolume(device, data_dir / "index", settings.data_file_bytes, block_device)

    return LocalEngine(folder, msgspec.structs.replace(SMALL, **changes), open_volume, clock)


def kernel_nvme_engine(folder: Path, path: Path, page_cache_bytes: int = -1) -> LocalEngine:
    """The local engine on a real namespace, which is wiped for a folder without a store."""
    if not (folder / "index" / "data.mdb").exists():
        wipe(path)
    return small_local_engine(folder, nvme_device=str(path), page_cache_bytes=page_cache_bytes)


def two_path_nvme_engine(folder: Path) -> LocalEngine:
    """The local engine on an emulated namespace with a page cache that commands go around."""
    device = EmulatedNvme(NVME_BYTES)
    return nvme_local_engine(folder, device, EmulatedBlockDevice(device))
