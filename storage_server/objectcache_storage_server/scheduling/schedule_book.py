"""What an operator changed of the schedule, kept in DATA_DIR/schedule.json over restarts.

The file is replaced whole: written beside, flushed, renamed, and the directory flushed. A crash at
any moment leaves the file as it was or as it is to be.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from objectcache_runtime.durable_names import flush_directory
from objectcache_runtime.settings import Settings
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import CAP_GBPS_MAX, CAP_GBPS_MIN
from objectcache_schemas.operators.schedule import (
    ScheduleChanges,
    ScheduleConfiguration,
    TenantShare,
)
from objectcache_storage_server.engines.disk.system_errors import as_our_error, translated

FILE_MODE = 0o600
FILE_BYTES_MAX = 16 << 20  # far above what TENANTS_MAX tenants take
TENANTS_MAX = 10_000
TENANT_CHARS_MAX = 256

_DECODER = msgspec.json.Decoder(ScheduleChanges)


class ScheduleBook:
    """The changes in force, and the schedule that they and the settings make. From any thread."""

    def __init__(self, settings: Settings) -> None:
        """Read the file, where there is one.

        Raises `InvalidRequest` that names the file and the remedy where it makes no sense, and
        `Unavailable` where it cannot be read. A server without a data directory keeps its changes
        until it ends.
        """
        self._settings = settings
        self._file = settings.schedule_file if settings.server.data_dir else None
        self._lock = threading.Lock()
        self._changes = _read(self._file) if self._file else ScheduleChanges()
        self._configuration = configuration(settings, self._changes)

    @property
    def changes(self) -> ScheduleChanges:
        """What is changed over the settings."""
        return self._changes

    @property
    def configuration(self) -> ScheduleConfiguration:
        """The schedule in force."""
        return self._configuration

    def paces(self, tenant: str) -> bool:
        """Whether a cap holds the bytes of this tenant back."""
        configuration = self._configuration
        share = configuration.tenants.get(tenant)
        return configuration.cap_gbps > 0 or (share is not None and share.cap_gbps > 0)

    def change(self, changes: ScheduleChanges, reset: bool = False) -> ScheduleConfiguration:
        """Add to the changes, or with `reset` begin from none; returns the schedule from now on.

        Blocks until the change outlives a crash. Raises `InvalidRequest` for what is out of bounds,
        and `StorageFull` or `Unavailable` where it cannot be kept; then nothing has changed.
        """
        with self._lock:
            merged = merge(ScheduleChanges() if reset else self._changes, changes)
            check(merged)
            found = configuration(self._settings, merged)
            if self._file is not None:
                _write(self._file, merged)
            self._changes, self._configuration = merged, found
            return found

    def __repr__(self) -> str:
        return f"<ScheduleBook {self._file} {self._changes}>"


def merge(earlier: ScheduleChanges, later: ScheduleChanges) -> ScheduleChanges:
    """Both; the later one wins. A tenant without a share is as everybody else again."""
    given = _given(later)
    given["tenants"] = _shares(earlier.tenants | later.tenants)
    return msgspec.structs.replace(earlier, **given)


def check(changes: ScheduleChanges) -> None:
    """Raise `InvalidRequest` for what the types of the fields cannot forbid."""
    if len(changes.tenants) > TENANTS_MAX:
        raise InvalidRequest(f"{len(changes.tenants)} tenants have a share, {TENANTS_MAX} may")
    _check_cap("cap_gbps", changes.cap_gbps)
    for name, share in changes.tenants.items():
        _check_cap("a tenant's cap_gbps", share.cap_gbps if share else None)
        if not 1 <= len(name) <= TENANT_CHARS_MAX:
            raise InvalidRequest(
                f"a tenant's name has 1 to {TENANT_CHARS_MAX} characters, one has {len(name)}"
            )


def _check_cap(name: str, cap_gbps: float | None) -> None:
    if cap_gbps and cap_gbps < CAP_GBPS_MIN:
        raise InvalidRequest(
            f"{name} must be 0 for none, or from {CAP_GBPS_MIN:g} to {CAP_GBPS_MAX:g}, "
            f"got {cap_gbps:g}"
        )


def configuration(settings: Settings, changes: ScheduleChanges) -> ScheduleConfiguration:
    """The settings, and over them the changes."""
    scheduler = settings.scheduler
    values: dict[str, Any] = {
        "policy": scheduler.policy,
        "cap_gbps": scheduler.cap_gbps,
        "margin_gbps": scheduler.margin_gbps,
        "epoch_s": scheduler.epoch_s,
        "rates": scheduler.rates,
        "layerwise_threshold_bytes": settings.storage.layerwise_threshold_bytes,
    }
    values |= _given(changes)
    values["tenants"] = _shares(changes.tenants)
    return msgspec.convert(values, ScheduleConfiguration)


def _given(changes: ScheduleChanges) -> dict[str, Any]:
    """The values that are changed, but for the tenants'."""
    values = msgspec.structs.asdict(changes)
    del values["tenants"]
    return {name: value for name, value in values.items() if value is not None}


def _shares(tenants: Mapping[str, TenantShare | None]) -> dict[str, TenantShare]:
    return {name: share for name, share in tenants.items() if share is not None}


# --- the file ---


def _read(file: Path) -> ScheduleChanges:
    try:
        # Without waiting: whatever stands there may be no file that anybody writes to.
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
            is_file = stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
            text = stream.read(FILE_BYTES_MAX + 1) if is_file else b""
    except FileNotFoundError:
        return ScheduleChanges()
    except OSError as error:
        raise as_our_error(error, "reading the changed schedule", file) from error
    try:
        if not is_file:
            raise InvalidRequest("it is no ordinary file")
        if len(text) > FILE_BYTES_MAX:
            raise InvalidRequest(f"it is over {FILE_BYTES_MAX} bytes")
        changes = _DECODER.decode(text)
        check(changes)
        return merge(ScheduleChanges(), changes)
    except (msgspec.MsgspecError, UnicodeDecodeError, InvalidRequest) as error:
        raise InvalidRequest(
            f"{file} cannot be read as a changed schedule: {error}; mend that, or delete the file "
            "to go back to the settings"
        ) from error


def _write(file: Path, changes: ScheduleChanges) -> None:
    text = msgspec.json.format(msgspec.json.encode(changes), indent=2)
    temporary = file.with_name(f"{file.name}.new")
    with translated("keeping the changed schedule", file):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            _write_flushed(temporary, text)
            temporary.replace(file)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        flush_directory(file.parent)


def _write_flushed(file: Path, text: bytes) -> None:
    file.unlink(missing_ok=True)  # left by a crash, with whatever mode
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    with open(descriptor, "wb") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(descriptor)
