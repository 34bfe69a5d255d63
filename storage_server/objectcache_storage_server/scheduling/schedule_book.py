"""What an operator changed of the schedule, kept as a document over restarts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from objectcache_runtime.settings import Settings
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import CAP_GBPS_MAX, CAP_GBPS_MIN
from objectcache_schemas.operators.schedule import (
    ScheduleChanges,
    ScheduleConfiguration,
    TenantShare,
)
from objectcache_storage_server.documents.documents import (
    SCHEDULE,
    DocumentChanged,
    Documents,
    KeptDocument,
)
from objectcache_storage_server.documents.open_documents import open_documents

DOCUMENT_BYTES_MAX = 16 << 20  # far above what TENANTS_MAX tenants take
TENANTS_MAX = 10_000
TENANT_CHARS_MAX = 256

_DECODER = msgspec.json.Decoder(ScheduleChanges)


class ScheduleBook:
    """The changes in force, and the schedule that they and the settings make. From any thread."""

    def __init__(self, settings: Settings, documents: Documents | None = None) -> None:
        """Read the document, where there is one; without `documents` those of the settings.

        Raises `InvalidRequest` that names its place and the remedy where it makes no sense, and
        `Unavailable` where it cannot be read. A server without a data directory keeps its changes
        until it ends.
        """
        self._settings = settings
        self._documents = documents or open_documents(settings)
        self._changing = threading.Lock()  # held while the store is asked
        self._publishing = threading.Lock()  # never
        self._version: int | None = None
        self._changes = ScheduleChanges()
        self._configuration = configuration(settings, self._changes)
        self._listeners: list[Callable[[], None]] = []
        # First, so that no change between the look and this is missed.
        self._documents.on_change(SCHEDULE, self._changed_elsewhere)
        self._read_again()

    def _read_again(self) -> None:
        document = self._documents.get(SCHEDULE)
        if document is not None:
            self._publish(document.version, _read(document, self._documents.place(SCHEDULE)))

    def _publish(self, version: int, changes: ScheduleChanges) -> None:
        """Put changes in force, unless newer ones are: versions grow."""
        changed = configuration(self._settings, changes)
        with self._publishing:
            if self._version is None or version > self._version:
                self._version, self._changes, self._configuration = version, changes, changed

    def _in_force(self) -> tuple[int | None, ScheduleChanges]:
        with self._publishing:
            return self._version, self._changes

    def _changed_elsewhere(self) -> None:
        self._read_again()
        for listener in self._listeners:
            listener()

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener`, from another thread, after another server has changed it."""
        self._listeners.append(listener)

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
        with self._changing:
            if self._documents.follow():
                self._read_again()
            while True:
                version, before = self._in_force()
                merged = merge(ScheduleChanges() if reset else before, changes)
                check(merged)
                configuration(self._settings, merged)
                try:
                    kept = self._documents.put(SCHEDULE, _encoded(merged), version)
                except DocumentChanged:
                    self._read_again()
                    continue
                self._publish(kept.version, merged)
                if kept.fault is not None:
                    raise kept.fault
                return self._configuration

    def __repr__(self) -> str:
        return f"<ScheduleBook {self._documents.place(SCHEDULE)} {self._changes}>"


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


# --- the document ---


def _read(document: KeptDocument, place: str) -> ScheduleChanges:
    try:
        if len(document.data) > DOCUMENT_BYTES_MAX:
            raise InvalidRequest(f"it is over {DOCUMENT_BYTES_MAX} bytes")
        changes = _DECODER.decode(document.data)
        check(changes)
        return merge(ScheduleChanges(), changes)
    except (msgspec.MsgspecError, UnicodeDecodeError, InvalidRequest) as error:
        raise InvalidRequest(
            f"{place} cannot be read as a changed schedule: {error}; mend that, or delete the file "
            "to go back to the settings"
        ) from error


def _encoded(changes: ScheduleChanges) -> bytes:
    return msgspec.json.format(msgspec.json.encode(changes), indent=2)
