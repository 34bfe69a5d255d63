"""The NVMe volume in an emulated machine, under Linux's own driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from objectcache_schemas.limits import MIB
from tests.hardware.nvme_machine import TIME_LIMIT_S, Drive, missing_part, run_in_machine

DRIVES = (
    Drive(128 * MIB, lba_bytes=512, mdts=5, nsid=1),
    Drive(128 * MIB, lba_bytes=4096, mdts=7, nsid=3),
)


@pytest.mark.timeout(TIME_LIMIT_S + 30)
def test_the_volume_runs_on_the_kernels_driver(tmp_path: Path) -> None:
    reason = missing_part()
    if reason:
        pytest.skip(reason)
    outcome = run_in_machine(
        tmp_path,
        DRIVES,
        ["tests/hardware/test_nvme_namespace.py", "-q", "-rA", "--color=no", "--durations=5"],
    )
    print(outcome.console)
    assert outcome.exit_code == 0
    assert "skipped" not in outcome.console
