"""The NVMe volume in an emulated machine, under Linux's own driver."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from objectcache_schemas.limits import MIB
from objectcache_storage_server.engines.local.volumes.nvme_superblock import HEADER_BYTES
from tests.crash.settings import SEED
from tests.hardware.lossy_drive import LossyDrive
from tests.hardware.nvme_machine import (
    TIME_LIMIT_S,
    Drive,
    Run,
    drive_path,
    missing_part,
    run_in_machine,
)
from tests.hardware.nvme_power import HALF_BYTES, SAVED, last_saved, lost

LOSSY_BYTES = 64 * MIB
SAVED_MAX = 40  # operations until the power goes, at most
VOLUMES = ("tests/hardware/test_nvme_namespace.py", "tests/hardware/test_nvme_paths.py")
REPORTED = ("-q", "-rA", "--color=no", "--durations=5")
# Of the contract what is about bytes; it says the same of buckets and names on every volume.
CONTRACT = (
    "nvme_ or (kernel and (read or chunk or written or overwrite or discard or copy or slices) "
    "and not (readers_see or many_))"
)
RUNS = (
    Run([0], [*VOLUMES, "tests/hardware/test_nvme_kills.py", *REPORTED]),
    Run([1], [*VOLUMES, "tests/contract/test_engines.py", "-k", CONTRACT, *REPORTED]),
)


@pytest.fixture
def lossy_drive(tmp_path: Path) -> Iterator[LossyDrive]:
    with LossyDrive(tmp_path / "nbd", LOSSY_BYTES) as served:
        yield served


@pytest.mark.timeout(TIME_LIMIT_S + 60)
def test_the_volume_runs_on_the_kernels_driver(tmp_path: Path, lossy_drive: LossyDrive) -> None:
    """Both paths, both sizes of blocks, the contract, kills, rot; in the end the power goes."""
    reason = missing_part()
    if reason:
        pytest.skip(reason)
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    saved_count = chance.randrange(SAVED_MAX // 2, SAVED_MAX)
    drives = (
        Drive(128 * MIB, lba_bytes=512, mdts=5, nsid=1),
        Drive(128 * MIB, lba_bytes=4096, mdts=7, nsid=3),
        Drive(LOSSY_BYTES, lba_bytes=4096, mdts=7, nsid=1, served=lossy_drive.path),
        Drive(2 * HALF_BYTES, lba_bytes=512, mdts=7, nsid=1),
    )
    outcome = run_in_machine(
        tmp_path,
        drives,
        RUNS,
        then=["tests.hardware.nvme_power", "/dev/ng{2}n1", "/dev/nvme{3}n1"],
        is_over=lambda line: line.strip() == f"{SAVED} {saved_count}",
    )
    print(outcome.console)
    assert outcome.exit_code == 0
    assert "skipped" not in outcome.console

    saved = last_saved(drive_path(tmp_path, 3))
    assert saved.number >= saved_count
    assert lossy_drive.flushes > 0
    left = lossy_drive.cut(chance)
    assert saved.stored
    assert lost(left, saved, tmp_path / "after") == []
    unflushed = left[:HEADER_BYTES] + bytes(len(left) - HEADER_BYTES)
    assert set(lost(unflushed, saved, tmp_path / "nothing")) == set(saved.stored)
