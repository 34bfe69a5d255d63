"""The audit log between requests and its file."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from objectcache_gateway.audit.audit_file import AuditFile
from objectcache_gateway.audit.audit_log import WAITING_BYTES_MAX, AuditLog, open_audit_log
from objectcache_runtime.settings import GatewaySettings

LINE = b"x" * ((1 << 20) - 1) + b"\n"


def test_there_is_none_by_default() -> None:
    assert open_audit_log(GatewaySettings()) is None


@pytest.mark.asyncio
async def test_lines_that_find_no_room_in_memory_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    log = AuditLog(AuditFile(path, 1 << 40, 1))
    lines = WAITING_BYTES_MAX // len(LINE)
    for _ in range(lines + 3):
        log.add(LINE)
    assert log.lost_lines == 3
    await log.close()
    assert (log.written_lines, path.stat().st_size) == (lines, lines * len(LINE))


@pytest.mark.asyncio
async def test_what_is_being_written_when_the_log_is_closed_is_written_to_its_end(
    tmp_path: Path,
) -> None:
    path = tmp_path / "audit.log"
    log = AuditLog(AuditFile(path, 1 << 40, 1))
    log.start()
    wanted: list[bytes] = []
    for number in range(50):
        wanted.append(b"%d\n" % number * 50_000)
        log.add(wanted[-1])
        await asyncio.sleep(0)  # the writer may begin
    await log.close()
    assert path.read_bytes() == b"".join(wanted)
    assert (log.written_lines, log.lost_lines) == (50, 0)


@pytest.mark.asyncio
async def test_losses_are_logged_once_in_a_while(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = AuditLog(AuditFile(tmp_path / "none" / "audit.log", 1 << 40, 1))
    for _ in range(3):
        log.add(b"a\n")
        await log.flush()
    assert [record.getMessage() for record in caplog.records] == [
        "gateway.audit_log cannot be written (No such file or directory); 1 lines are lost so far"
    ]
    assert log.lost_lines == 3
