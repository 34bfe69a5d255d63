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

from objectcache.cli.admin.amounts import size_text
from objectcache.cli.admin.printable import printable
from objectcache.cli.admin.storage_socket import StorageSocket
from objectcache_schemas.engine_status import (
    CheckEnded,
    CheckEngine,
    CheckProgress,
    CheckReport,
    EngineState,
    GetEngineStatus,
)
from objectcache_schemas.message import Message

EXIT_CLEAN, EXIT_FINDINGS = 0, 1
EXIT_INTERRUPTED = 130  # as a shell reports SIGINT


def check(storage: StorageSocket, repair: bool, console: Console) -> CheckReport:
    """Have the store checked, with progress on `console` where that is a terminal."""
    live_bytes = storage.ask(GetEngineStatus(), EngineState).status.live_bytes
    storage.send(CheckEngine(repair=repair))
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
        while True:
            message = storage.receive(Message)
            if isinstance(message, CheckEnded):
                return message.report
            if isinstance(message, CheckProgress):
                progress.update(
                    task, completed=message.report.bytes, description=_so_far(message.report)
                )


def _so_far(report: CheckReport) -> str:
    findings = report.damaged + report.misplaced
    return f"{report.objects:,} objects, {findings:,} bad"


def is_clean(report: CheckReport) -> bool:
    """Whether nothing was found."""
    return not (report.damaged or report.misplaced or report.leaked_bytes)


def report_lines(report: CheckReport, repair: bool) -> list[str]:
    """What was checked, what was found, and what to do about it."""
    checked = f"checked {report.objects:,} objects, {size_text(report.bytes)}"
    if is_clean(report):
        return [f"{checked}: clean"]
    lines = [
        f"{checked}:",
        f"  damaged    {report.damaged:,} objects do not match their checksums",
        f"  misplaced  {report.misplaced:,} objects or extents cannot lie where they are",
        f"  leaked     {size_text(report.leaked_bytes)} that nothing uses",
        f"  dropped    {report.dropped:,} objects",
        *(f"  - {printable(example)}" for example in report.examples),
    ]
    if not repair:
        lines.append("drop what is bad with --repair; a chunk that is dropped is computed again")
    return lines
