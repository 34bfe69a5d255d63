"""`objectcache calibrate`: from flags to a report, and with --apply to the server's schedule."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from objectcache.client import Client
from objectcache_laboratory.access import StoreAccess
from objectcache_laboratory.calibration.bucket import calibration_bucket
from objectcache_laboratory.calibration.calibrate import (
    RATE_FACTORS,
    Calibration,
    calibrate,
    expected_s,
)
from objectcache_laboratory.calibration.curve_svg import curves_svg
from objectcache_laboratory.calibration.geometry import (
    DEFAULT_GEOMETRIES,
    DEFAULT_SCALE,
    ModelGeometry,
    check_geometries,
    parse_geometries,
    parse_geometry,
)
from objectcache_laboratory.calibration.measure import Measurement
from objectcache_laboratory.calibration.report import document, report
from objectcache_operations.admin.api_client import ApiClient
from objectcache_operations.admin.command import local_access
from objectcache_operations.console.settings_flags import find_settings
from objectcache_runtime.amounts import duration_text, gbps_text
from objectcache_runtime.root_key import ROOT_CREDENTIALS_FILE
from objectcache_runtime.settings import Settings
from objectcache_schemas.descriptor import RATE_MIN
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import BYTES_PER_GBIT, GIB
from objectcache_schemas.operators.admin_api import ScheduleChange
from objectcache_schemas.operators.schedule import ScheduleState

TARGET_BYTES_MAX = 16 * GIB


@dataclass(frozen=True, slots=True)
class CalibrateOptions:
    """The flags of one calibration. `settings` are the server's, where its admin socket is used."""

    geometries: tuple[ModelGeometry, ...]
    scale: float
    repeats: int
    transport: str
    apply: bool
    as_json: bool
    svg: Path | None
    settings: Settings | None

    @property
    def scaled(self) -> tuple[ModelGeometry, ...]:
        """The geometries as they are measured."""
        return tuple(geometry.scaled(self.scale) for geometry in self.geometries)


def geometries_of(given: list[str], profile: Path | None) -> tuple[ModelGeometry, ...]:
    """Those of the flags, else those of the paper; raises `InvalidRequest`."""
    if given and profile is not None:
        raise InvalidRequest("give --geometry or --profile, not both")
    geometries = [parse_geometry(text) for text in given]
    if profile is not None:
        try:
            geometries = parse_geometries(profile.read_text("utf-8-sig"))
        except OSError as error:
            raise InvalidRequest(f"--profile {profile}: {error.strerror}") from error
        except (InvalidRequest, UnicodeDecodeError) as error:
            raise InvalidRequest(f"--profile {profile}: {error}") from error
    check_geometries(geometries)
    return tuple(geometries) or DEFAULT_GEOMETRIES


def scale_of(given: float | None, has_geometries: bool) -> float:
    """What divides the bytes: given ones are meant as they are, those of the paper are large."""
    if given is not None:
        return given
    return 1.0 if has_geometries else DEFAULT_SCALE


def run(options: CalibrateOptions, access: StoreAccess, console: Console) -> None:
    """Measure, show, and write what was found where --apply says so.

    Raises `ObjectCacheError`; before anything was measured where a file cannot be written or the
    server's admin socket, needed by --apply, is not there.
    """
    for geometry in options.scaled:
        lowest = geometry.zero_stall_rate * min(RATE_FACTORS)
        if lowest < RATE_MIN:
            raise InvalidRequest(
                f"{geometry.name}: the sweep begins at {lowest:.0f} bytes per second, and a "
                f"delivery takes {RATE_MIN} at least; give it more bytes per layer, or less --scale"
            )
    if options.svg is not None and not options.svg.absolute().parent.is_dir():
        raise InvalidRequest(f"--svg {options.svg}: there is no such directory")
    state = _state(options)
    if not options.as_json:
        console.print(_introduction(options, state))
    calibration = _calibrate(options, access)
    if options.svg is not None:
        _write(options.svg, curves_svg(calibration))
    is_applied = options.apply and _apply(options, calibration)
    if options.as_json:
        content = document(calibration, is_applied)
        print(msgspec.json.format(msgspec.json.encode(content), indent=2).decode())
        return
    console.print(*report(calibration), _ending(options, is_applied), sep="\n")


def _state(options: CalibrateOptions) -> ScheduleState | None:
    """The schedule in force, where the admin socket is at hand; with --apply it must be."""
    if options.settings is None:
        return None
    with ApiClient(local_access(options.settings)) as client:
        return client.get("/v1/schedule", ScheduleState)


@contextmanager
def _ended_as_by_ctrl_c() -> Generator[None]:
    """SIGTERM ends what runs as Ctrl-C does, so that the bucket is deleted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _calibrate(options: CalibrateOptions, access: StoreAccess) -> Calibration:
    columns = SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    with (
        _ended_as_by_ctrl_c(),
        Progress(*columns, console=Console(stderr=True), transient=True) as progress,
        Client(
            access.endpoint,
            access_key=access.access_key,
            secret_key=access.secret_key,
            transport=options.transport,
            target_bytes_max=TARGET_BYTES_MAX,
            learn_windows=False,
            tls=access.tls(),
        ) as client,
        calibration_bucket(client, access) as bucket,
    ):
        task = progress.add_task("")
        return calibrate(
            Measurement(client, bucket),
            options.geometries,
            options.scale,
            options.repeats,
            lambda what: progress.update(task, description=what),
        )


def _apply(options: CalibrateOptions, calibration: Calibration) -> bool:
    changes = calibration.changes
    if changes.margin_gbps is None and changes.layerwise_threshold_bytes is None:
        return False
    assert options.settings is not None
    with ApiClient(local_access(options.settings)) as client:
        client.send("PATCH", "/v1/schedule", ScheduleChange(changes=changes), ScheduleState)
    return True


def _introduction(options: CalibrateOptions, state: ScheduleState | None) -> str:
    takes = duration_text(round(expected_s(options.scaled, options.repeats)))
    lines = [f"{len(options.geometries)} geometries, about {takes}, one delivery at a time"]
    if options.scale != 1:
        lines.append(
            f"bytes are divided by {options.scale:g}, times are not: the rates shown are those of "
            "geometries of that size, and the margin is proposed for whole ones, so it is "
            f"multiplied by {options.scale:g} (--scale 1 measures whole ones, --geometry your own)"
        )
    cap_gbps = state.configuration.cap_gbps if state else 0.0
    highest = max(geometry.zero_stall_rate for geometry in options.scaled) / BYTES_PER_GBIT
    if 0 < cap_gbps < highest:
        lines.append(
            f"the server's cap, {gbps_text(cap_gbps)}, is below the highest r*, "
            f"{gbps_text(highest)}: no knee will show there"
        )
    return "\n".join(lines)


def _ending(options: CalibrateOptions, is_applied: bool) -> str:
    if is_applied:
        return "written: they hold from now on, and after a restart"
    if options.apply:
        return "nothing was written"
    return "not written; with --apply they are, or by `objectcache admin schedule`"


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, "utf-8")
    except OSError as error:
        raise InvalidRequest(f"--svg {file}: {error.strerror}") from error


def default_credentials(data_dir: str | None) -> Path | None:
    """The root credentials beside the data, where they can be read.

    Raises `InvalidRequest` where there is no such directory.
    """
    if data_dir and not Path(data_dir).is_dir():
        raise InvalidRequest(f"--data-dir {data_dir}: there is no such directory")
    file = Path(data_dir) / ROOT_CREDENTIALS_FILE if data_dir else None
    return file if file and os.access(file, os.R_OK) else None


def settings_of(
    config: str | None, data_dir: str | None, assignments: list[str] | None, is_needed: bool
) -> Settings | None:
    """The server's settings, where flags or environment say where it is; raises `InvalidRequest`
    where they do not and `is_needed`.
    """
    settings = find_settings(config, data_dir, assignments)
    if settings.server.data_dir or settings.server.run_dir:
        return settings
    if is_needed:
        raise InvalidRequest("--apply writes through the server's own socket: give --data-dir DIR")
    return None
