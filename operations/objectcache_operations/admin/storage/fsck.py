"""A check of the store, as one watches it."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from objectcache_operations.admin.api_client import ApiClient
from objectcache_operations.admin.printable import printable
from objectcache_runtime.amounts import size_text
from objectcache_schemas.errors import ObjectCacheError, Unavailable, WireError
from objectcache_schemas.operators.admin_api import CheckChoice, CheckLine
from objectcache_schemas.operators.engine_status import CheckReport, EngineStatus

EXIT_CLEAN, EXIT_FINDINGS = 0, 1
EXIT_INTERRUPTED = 130  # as a shell reports SIGINT


def check(client: ApiClient, repair: bool, console: Console) -> CheckReport:
    """Have the store checked, with progress on `console` where that is a terminal."""
    live_bytes = client.get("/v1/engine", EngineStatus).live_bytes
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("checking", total=live_bytes or None)
        for line in client.stream("/v1/checks", CheckChoice(repair=repair), CheckLine):
            if line.problem is not None:
                problem = line.problem
                raise ObjectCacheError.from_wire(WireError(problem.code, problem.message))
            if line.ended:
                return line.report
            progress.update(task, completed=line.report.bytes, description=_so_far(line.report))
    raise Unavailable("the admin API ended the check before it was through; see its log")


def _so_far(report: CheckReport) -> str:
    findings = report.damaged + report.misplaced + report.bad_log_records
    return f"{report.objects:,} objects, {findings:,} bad"


def is_clean(report: CheckReport) -> bool:
    """Whether nothing was found."""
    return not (report.damaged or report.misplaced or report.leaked_bytes or report.bad_log_records)


def report_lines(report: CheckReport, repair: bool) -> list[str]:
    """What was checked, what was found, and what to do about it."""
    checked = f"checked {report.objects:,} objects, {size_text(report.bytes)}"
    if report.log_records or report.bad_log_records:
        checked += f", {report.log_records:,} records of the log"
    if is_clean(report):
        return [f"{checked}: clean"]
    lines = [
        f"{checked}:",
        f"  damaged    {report.damaged:,} objects do not match their checksums",
        f"  misplaced  {report.misplaced:,} objects or extents cannot lie where they are",
        f"  leaked     {size_text(report.leaked_bytes)} that nothing uses",
        f"  dropped    {report.dropped:,} objects",
        *log_lines(report),
        *(f"  - {printable(example)}" for example in report.examples),
    ]
    if not repair and (report.damaged or report.misplaced or report.leaked_bytes):
        lines.append("drop what is bad with --repair; a chunk that is dropped is computed again")
    return lines


def log_lines(report: CheckReport) -> list[str]:
    """What is wrong with a shared store's log."""
    if not report.bad_log_records:
        return []
    return [
        f"  log        {report.bad_log_records:,} records or checkpoints are missing or damaged; "
        "servers that run need none of them, one that starts may"
    ]
