"""What a check says of a shared store's log."""

from __future__ import annotations

from objectcache_operations.admin.storage.fsck import is_clean, report_lines
from objectcache_schemas.operators.engine_status import CheckReport


def test_a_clean_log_is_counted_and_no_log_is_not_spoken_of() -> None:
    with_log = report_lines(CheckReport(objects=2, log_records=1234), repair=False)
    assert with_log == ["checked 2 objects, 0 B, 1,234 records of the log: clean"]
    assert report_lines(CheckReport(objects=2), repair=False) == ["checked 2 objects, 0 B: clean"]


def test_a_damaged_log_is_a_finding_that_repair_does_not_mend() -> None:
    report = CheckReport(log_records=9, bad_log_records=1, examples=("record 4 is not there",))
    assert not is_clean(report)
    lines = report_lines(report, repair=False)
    assert any("1 records or checkpoints are missing or damaged" in line for line in lines)
    assert "  - record 4 is not there" in lines
    assert not any("--repair" in line for line in lines)
