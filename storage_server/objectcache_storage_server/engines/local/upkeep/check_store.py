"""Checks a store that is in use: where its objects lie, and every byte against its checksum.

First the index is compared with the space that it names, in one snapshot, without the data. Then
every object is read in pieces, a page of objects held at a time: puts, deletes and reads go on,
and while others read, the check reads half of the time at most. What was replaced, moved or deleted
meanwhile is no finding.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

import msgspec
import numpy as np

from objectcache_schemas.errors import DamagedData
from objectcache_schemas.limits import MIB
from objectcache_schemas.operators.engine_status import CheckReport
from objectcache_storage_server.engines.local.index.lmdb_index import IndexChange, IndexView
from objectcache_storage_server.engines.local.objects.stored_objects import StoredObjects
from objectcache_storage_server.engines.local.reads.verified_reads import LocalOpenObjects
from objectcache_storage_server.engines.local.records import Version
from objectcache_storage_server.engines.local.space.dense_tables import EXTENT_COLUMNS, DenseTable
from objectcache_storage_server.engines.local.upkeep.find_misplaced import (
    Claims,
    Extents,
    outside_extents,
    overlapping_extents,
    place_fault,
    unnamed_extents,
)

EXAMPLES_MAX = 20
SCAN_VERSIONS = 1024  # decoded at a time in the comparison of index and space
PAGE_VERSIONS = 64  # held at a time while their bytes are read
PIECE_BYTES = 1 * MIB
PROGRESS_BYTES = 64 * MIB  # between two reports of progress
_IDENTITY = ("is_used", "offset_bytes", "length_bytes", "slots")  # of an extent's row


def check_objects(
    stored: StoredObjects,
    repair: bool,
    on_progress: Callable[[CheckReport], bool],
    pause: Callable[[float], None] = time.sleep,
) -> CheckReport:
    """See `Engine.check`. `pause` waits so many seconds."""
    findings = _Findings()
    with contextlib.closing(_carry_out(stored, repair, findings, pause)) as steps:
        for _ in steps:
            if not on_progress(findings.report()):
                break
    return findings.report()


def _carry_out(
    stored: StoredObjects, repair: bool, findings: _Findings, pause: Callable[[float], None]
) -> Generator[None, None, None]:
    findings.name_buckets(stored)
    places = _Places.scan(stored, findings)
    yield
    if repair:
        _repair_places(stored, places, findings)
    yield from _BytesCheck(stored, repair, findings, places, pause).steps()


class _Findings:
    """What was found so far."""

    def __init__(self) -> None:
        self.objects = self.bytes = self.damaged = self.misplaced = 0
        self.leaked_bytes = self.dropped = 0
        self._examples: list[str] = []
        self._buckets: dict[int, str] = {}

    def name_buckets(self, stored: StoredObjects) -> None:
        with stored.index.reading() as view:
            self._buckets = {row.number: row.info.name for row in view.bucket_rows()}

    def example(self, words: str) -> None:
        if len(self._examples) < EXAMPLES_MAX:
            self._examples.append(words)

    def example_of(self, bucket_number: int, key: str, reason: str) -> None:
        bucket = self._buckets.get(bucket_number, f"number {bucket_number}")
        self.example(f"bucket {bucket!r}, key {key!r}: {reason}")

    def add_damaged_rows(self, view: IndexView) -> None:
        """Index rows that failed their checksum are dropped by the look-up that met them."""
        for bucket_number, key in view.damage.rows:
            self.damaged += 1
            self.dropped += 1
            self.example_of(bucket_number, key, "its index row does not match its checksum")

    def report(self) -> CheckReport:
        return CheckReport(
            objects=self.objects,
            bytes=self.bytes,
            damaged=self.damaged,
            misplaced=self.misplaced,
            leaked_bytes=self.leaked_bytes,
            dropped=self.dropped,
            examples=tuple(self._examples),
        )


# --- places ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Places:
    """What one snapshot of the index says that cannot be."""

    impossible: list[Version]  # that cannot lie where they say
    shared: list[list[Version]]  # objects that claim one place, those stored first first
    unnamed: list[int]  # extents in which nobody lives
    damaged_rows: list[int]  # extents whose index row is damaged, and which memory still knows
    miscounts: dict[int, tuple[np.void, int]]  # extents as memory has them, and objects it misses

    @classmethod
    def scan(cls, stored: StoredObjects, findings: _Findings) -> _Places:
        """Compare the index with the space that it names, and count what is found."""
        with contextlib.ExitStack() as stack:
            with stored.changing:  # memory and index as of one moment
                _, held = stored.holdings.snapshot()
                view = stack.enter_context(stored.index.reading())
            extents, damaged_rows = _stored_extents(view, held)
            claims, impossible = _claims(view, extents, findings)
            shared = _claimants(view, claims.shared())
        findings.add_damaged_rows(view)
        findings.misplaced += sum(len(group) - 1 for group in shared)
        for group in shared:
            version = group[-1]
            other = group[0].info.key
            findings.example_of(
                version.bucket_number, version.info.key, f"it claims the place of {other!r}"
            )
        for number in damaged_rows:
            findings.misplaced += 1
            findings.example(f"extent {number}: its index row does not match its checksum")
        _count_extent_faults(stored, extents, findings)
        unnamed = unnamed_extents(extents, claims)
        findings.leaked_bytes += int(extents["length_bytes"][unnamed].sum())
        for number in unnamed.tolist():
            findings.example(f"extent {number}: no object lies in it")
        return cls(
            impossible, shared, unnamed.tolist(), damaged_rows, _miscounts(extents, held, claims)
        )


def _stored_extents(view: IndexView, held: Extents) -> tuple[Extents, list[int]]:
    """The index's extents, and the numbers of those that it has lost and memory has not."""
    table = DenseTable(EXTENT_COLUMNS)
    view.load_extents(table)
    is_known = held["is_used"] & ~held["is_freed"]
    lost = [number for number in np.flatnonzero(is_known).tolist() if number in view.damage.extents]
    view.damage.extents.difference_update(lost)  # what a look-up has met is dropped when it ends
    for number in lost:
        table.add_at(number)
        table.rows[number] = held[number]
    return table.used, lost


def _claims(view: IndexView, extents: Extents, findings: _Findings) -> tuple[Claims, list[Version]]:
    claims, impossible = Claims(), list[Version]()
    for version in _versions(view):
        reason = place_fault(version, extents)
        if reason is None:
            claims.add(version)
        else:
            impossible.append(version)
            findings.misplaced += 1
            findings.example_of(version.bucket_number, version.info.key, reason)
    return claims, impossible


def _claimants(view: IndexView, places: Iterable[tuple[int, int]]) -> list[list[Version]]:
    groups: dict[tuple[int, int], list[Version]] = {place: [] for place in places}
    if groups:
        for version in _versions(view):
            for number in version.extents:
                if (number, version.slot) in groups:
                    groups[number, version.slot].append(version)
    return [sorted(group, key=lambda version: version.serial) for group in groups.values()]


def _versions(view: IndexView) -> Iterator[Version]:
    after: tuple[int, str] | None = None
    while page := view.every_version(after, SCAN_VERSIONS):
        yield from page
        after = (page[-1].bucket_number, page[-1].info.key)


def _count_extent_faults(stored: StoredObjects, extents: Extents, findings: _Findings) -> None:
    volume = stored.volume
    outside = outside_extents(extents, volume.segments(), volume.segment_bytes)
    for words, numbers in (
        ("overlaps another", overlapping_extents(extents)),
        ("lies outside of the volume", outside),
    ):
        findings.misplaced += len(numbers)
        for number in numbers.tolist():
            findings.example(f"extent {number} {words}")


def _miscounts(extents: Extents, held: Extents, claims: Claims) -> dict[int, tuple[np.void, int]]:
    both = min(len(extents), len(held))
    missing = claims.per_extent(both) - held["live_slots"][:both]
    wrong = np.flatnonzero(extents["is_used"][:both] & (missing != 0))
    return {number: (held[number], int(missing[number])) for number in wrong.tolist()}


# --- repairing places -----------------------------------------------------------------------------


def _repair_places(stored: StoredObjects, places: _Places, findings: _Findings) -> None:
    """Drop what cannot be right. Counts come first: they say which extents a drop empties."""
    stored.forget_lost()  # of what the scan dropped, while its extents are still its own
    _recount(stored, places)
    for version in places.impossible:
        findings.dropped += _drop(stored, version, ())  # no extent counts it
    for group in places.shared:
        whole = [version for version in group if _is_whole(stored, version)]
        for version in group:
            if version not in whole[:1]:
                findings.dropped += _drop(stored, version, version.extents)
    _repair_extents(stored, places)


def _recount(stored: StoredObjects, places: _Places) -> None:
    """Correct how many objects memory counts in an extent, by what it was wrong by. Where that
    changed meanwhile, the next check will see.
    """
    holdings = stored.holdings
    with stored.changing, holdings.lock:
        rows = holdings.extents.rows
        for number, (row, missing) in places.miscounts.items():
            now = rows[number]
            is_same = all(now[name] == row[name] for name in (*_IDENTITY, "live_slots"))
            if is_same and not now["is_freed"]:
                rows["live_slots"][number] = max(0, int(now["live_slots"]) + missing)


def _is_whole(stored: StoredObjects, version: Version) -> bool:
    opened = _open(stored, [version])
    if opened is None:
        return False
    memory = memoryview(bytearray(min(PIECE_BYTES, version.info.size_bytes)))
    try:
        with opened:
            for offset_bytes in range(0, version.info.size_bytes, PIECE_BYTES):
                opened.read_into(0, offset_bytes, memory[: version.info.size_bytes - offset_bytes])
    except DamagedData:
        return False
    return True


def _open(stored: StoredObjects, versions: Sequence[Version]) -> LocalOpenObjects | None:
    """Hold versions, if the index names all of them still."""
    with stored.holdings.looking_up():
        if all(_is_current(stored, version) for version in versions):
            return stored.open_versions(versions)
    return None


def _drop(stored: StoredObjects, version: Version, extents: tuple[int, ...]) -> bool:
    """Delete a version that is counted in `extents` only, whatever its record names."""
    emptied: list[int] = []

    def change_index(change: IndexChange) -> list[Version]:
        deleted = [
            msgspec.structs.replace(each, extents=extents) for each in change.delete([version.name])
        ]
        emptied[:] = stored.holdings.emptied_by(deleted)
        change.remove_extents(emptied)
        return deleted

    with stored.changing:
        deleted = stored.index.change_with_reserve(change_index)
        stored.holdings.forget(deleted)
        stored.flusher.drop(emptied)
    for each in deleted:
        stored.damage.add(each.info.key, "its place is impossible, or another object's")
    return bool(deleted)


def _repair_extents(stored: StoredObjects, places: _Places) -> None:
    """Store rows of extents again that the index has lost, and free those that nobody names.

    An extent that was given out again meanwhile has a writer or objects.
    """
    holdings = stored.holdings
    with stored.changing:
        with holdings.lock:
            rows = holdings.extents.used
            is_known = rows["is_used"] & ~rows["is_freed"]
            is_idle = is_known & (rows["live_slots"] == 0) & (rows["readers"] == 0)
            freed = [number for number in places.unnamed if number < len(rows) and is_idle[number]]
            lost = [
                number for number in places.damaged_rows if is_known[number] and number not in freed
            ]
            lost_rows, lost_pitches = rows[lost], holdings.pitches_of(lost)
        if not freed and not lost:
            return
        with stored.index.writing() as change:
            change.remove_extents(freed)
            change.add_extents(lost, lost_rows, lost_pitches)
        stored.flusher.drop(freed)


# --- bytes ----------------------------------------------------------------------------------------


class _BytesCheck:
    """Reads every object."""

    def __init__(
        self,
        stored: StoredObjects,
        repair: bool,
        findings: _Findings,
        places: _Places,
        pause: Callable[[float], None],
    ) -> None:
        self._objects = stored
        self._repair = repair
        self._findings = findings
        self._unreadable = {version.name for version in places.impossible}
        self._shared = {version.name for group in places.shared for version in group}
        self._pause = pause
        self._memory = memoryview(bytearray(PIECE_BYTES))
        self._reported_bytes = 0

    def steps(self) -> Iterator[None]:
        """Steps of the check; between two of them it can be ended."""
        stored = self._objects
        after: tuple[int, str] | None = None
        while True:
            with contextlib.ExitStack() as held:
                with stored.holdings.looking_up():
                    with stored.index.reading() as view:
                        page = view.every_version(after, PAGE_VERSIONS)
                    opened = [
                        (held.enter_context(stored.open_versions(versions)), versions)
                        for versions in self._apart(page)
                    ]
                self._findings.add_damaged_rows(view)
                for objects, versions in opened:
                    for index, version in enumerate(versions):
                        yield from self._read(objects, index, version)
            if not page:
                return
            after = (page[-1].bucket_number, page[-1].info.key)
            yield

    def _apart(self, page: Sequence[Version]) -> list[list[Version]]:
        """What is to be opened: those that claim one place never together."""
        readable = [each for each in page if each.name not in self._unreadable]
        together = [each for each in readable if each.name not in self._shared]
        alone = [[each] for each in readable if each.name in self._shared]
        return [together, *alone] if together else alone

    def _read(self, opened: LocalOpenObjects, index: int, version: Version) -> Iterator[None]:
        size_bytes = version.info.size_bytes
        self._findings.objects += 1
        for offset_bytes in range(0, size_bytes, PIECE_BYTES):
            memory = self._memory[: size_bytes - offset_bytes]
            started_s = time.monotonic()
            try:
                opened.read_into(index, offset_bytes, memory)
            except DamagedData as damage:
                self._found(version, str(damage))
                return
            self._findings.bytes += len(memory)
            if any(device.readers for device in self._objects.path_use.devices.values()):
                self._pause(time.monotonic() - started_s)
            if self._findings.bytes - self._reported_bytes >= PROGRESS_BYTES:
                self._reported_bytes = self._findings.bytes
                yield

    def _found(self, version: Version, reason: str) -> None:
        """Count it, and drop it if it is to be: the held bytes were this version's own."""
        if not _is_current(self._objects, version):
            return
        self._findings.damaged += 1
        self._findings.example_of(version.bucket_number, version.info.key, reason)
        if self._repair:
            self._findings.dropped += self._objects.drop_damaged(version, reason)


def _is_current(stored: StoredObjects, version: Version) -> bool:
    with stored.index.reading() as view:
        found = view.versions(version.bucket_number, [version.info.key]).get(version.info.key)
    return found is not None and found.serial == version.serial
