"""Checks a shared store that is in use, on one server, while others write.

First the log is read (`check_log.py`). Then the store's listing is compared with the index, a page
at a time: each page with a moment of the index after it was listed. Whatever was put by a writer
that lives is left alone, since a record may name it yet. Then every object is read, extent by
extent, and compared with its checksums. What was replaced or deleted meanwhile is no finding.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

from objectcache_schemas.errors import DamagedData, NotFound
from objectcache_schemas.limits import MIB
from objectcache_schemas.operators.engine_status import CheckReport
from objectcache_schemas.records import Verification
from objectcache_storage_server.engines.base import Placement, Read
from objectcache_storage_server.engines.shared.extents.open_extents import (
    ExtentReader,
    SharedOpenObjects,
)
from objectcache_storage_server.engines.shared.extents.read_sources import lay_out
from objectcache_storage_server.engines.shared.index.replayed_view import ReplayedView
from objectcache_storage_server.engines.shared.log.keep_checkpoints import old_objects
from objectcache_storage_server.engines.shared.log.log_catalog import LogCatalog
from objectcache_storage_server.engines.shared.log.log_records import UnreadableRecord
from objectcache_storage_server.engines.shared.upkeep.check_findings import CheckFindings
from objectcache_storage_server.engines.shared.upkeep.check_log import LogCheck
from objectcache_storage_server.engines.shared.upkeep.object_names import (
    DATA_PREFIX,
    DataObject,
    data_object,
    pages,
    piece_bytes,
)
from objectcache_storage_server.engines.shared.upkeep.sweep_leftovers import LISTING_S, unnamed
from objectcache_storage_server.engines.shared.versions import ExtentName, SharedVersion
from objectcache_storage_server.engines.stores.shared_store import LostObject, ObjectRead

PAGE_EXTENTS = 64  # of the index, at a time
PAGE_VERSIONS = 1024  # of those without bytes
PIECE_BYTES = 4 * MIB  # read at once
PROGRESS_BYTES = 64 * MIB  # between two reports of progress


def check_shared(
    reader: ExtentReader,
    catalog: LogCatalog,
    repair: bool,
    on_progress: Callable[[CheckReport], bool],
) -> CheckReport:
    """See `Engine.check`. `reader` drops what is damaged, with `repair`."""
    findings = CheckFindings(catalog)
    with contextlib.closing(_steps(reader, catalog, repair, findings)) as steps:
        for _ in steps:
            if not on_progress(findings.report()):
                break
    return findings.report()


def _steps(
    reader: ExtentReader, catalog: LogCatalog, repair: bool, findings: CheckFindings
) -> Generator[None, None, None]:
    yield from LogCheck(reader.store, catalog, reader.deadline_s, findings).steps()
    try:
        yield from _ListingCheck(reader, catalog, repair, findings).steps()
        yield from _BytesCheck(reader, catalog, repair, findings).steps()
    except UnreadableRecord as error:
        if not findings.bad_records:
            raise
        findings.example(f"objects were not checked: {error}")


# --- the listing ----------------------------------------------------------------------------------


class _ListingCheck:
    """The store's objects against what the index says of them."""

    def __init__(
        self, reader: ExtentReader, catalog: LogCatalog, repair: bool, findings: CheckFindings
    ) -> None:
        self._reader = reader
        self._catalog = catalog
        self._repair = repair
        self._findings = findings

    def steps(self) -> Iterator[None]:
        """Steps of the check; between two of them it can be ended."""
        listing = self._reader.store.list_objects(DATA_PREFIX, time.monotonic() + LISTING_S)
        for page in pages(each for each in map(data_object, listing) if each is not None):
            self._catalog.follow(self._reader.deadline_s())  # newcomers are in the log by now
            with self._catalog.reading() as view:
                too_long = self._too_long(view, page)
                leftovers = self._leftovers(view, page)
            self._findings.leaked_bytes += sum(each.size_bytes for each in leftovers)
            for each in leftovers:
                self._findings.example(f"{each.name}: no extent names it, and its writer is dead")
            self._remove([each.name for each in leftovers])
            if self._repair:
                for each, expected_bytes in too_long:
                    self._cut(each.name, expected_bytes)
            yield
        yield from self._checkpoints()

    def _checkpoints(self) -> Iterator[None]:
        """Leftovers of checkpoints. A try behind the newest one may be under way, and counts once
        another checkpoint came after it.
        """
        with self._catalog.reading() as view:
            state = view.state
        leftovers = old_objects(self._reader.store, state, time.monotonic() + LISTING_S)
        self._findings.leaked_bytes += sum(each.size_bytes for each in leftovers)
        for each in leftovers:
            self._findings.example(f"{each.name}: it is of no checkpoint that is kept")
        self._remove([each.name for each in leftovers])
        yield

    def _remove(self, names: Sequence[str]) -> None:
        """With `repair`."""
        if self._repair and names:
            self._reader.store.delete(names, self._reader.deadline_s())

    def _too_long(
        self, view: ReplayedView, page: Sequence[DataObject]
    ) -> list[tuple[DataObject, int]]:
        """Those with more bytes than they should have, and how many that is. Reads of one that is
        too short fail, and so its bytes are checked with all others.
        """
        too_long: list[tuple[DataObject, int]] = []
        for each in page:
            row = view.extent(each.extent)
            if row is None:
                continue
            expected_bytes = piece_bytes(row.shape, each.piece)
            if each.size_bytes != expected_bytes:
                self._findings.misplaced += 1
                self._findings.example(
                    f"{each.name}: it has {each.size_bytes} bytes instead of {expected_bytes}"
                )
            if each.size_bytes > expected_bytes:
                too_long.append((each, expected_bytes))
        return too_long

    def _cut(self, name: str, size_bytes: int) -> None:
        """Store an object again without what nobody reads behind its bytes, where two reads of
        these agree: what was bent on its way is not to be stored.
        """
        store, deadline_s = self._reader.store, self._reader.deadline_s
        if not size_bytes:
            store.delete([name], deadline_s())
            return
        kept, again = bytearray(size_bytes), bytearray(size_bytes)
        try:
            for landing in (kept, again):
                read = ObjectRead(name, 0, memoryview(landing))
                store.begin_reads([read], deadline_s()).result()
        except LostObject:  # it was deleted meanwhile
            return
        if kept == again:
            store.put(name, [memoryview(kept)], deadline_s())

    def _leftovers(self, view: ReplayedView, page: Sequence[DataObject]) -> list[DataObject]:
        """Of writers that are forgotten: a fenced one may still be storing, and the sweep is to
        come. Nothing of theirs is ever named.
        """
        known = view.writers()
        return unnamed(view, [each for each in page if each.extent.writer not in known])


# --- bytes ----------------------------------------------------------------------------------------


class _CheckReader(ExtentReader):
    """Reads, and drops nothing."""

    def __init__(self, reader: ExtentReader) -> None:
        self.store = reader.store
        self._reader = reader

    def deadline_s(self) -> float:
        return self._reader.deadline_s()

    def drop_damaged(self, versions: Iterable[SharedVersion], reason: str) -> Exception:
        return DamagedData(reason)


class _BytesCheck:
    """Reads every object."""

    def __init__(
        self, reader: ExtentReader, catalog: LogCatalog, repair: bool, findings: CheckFindings
    ) -> None:
        self._dropping = reader
        self._reader = _CheckReader(reader)
        self._catalog = catalog
        self._repair = repair
        self._findings = findings
        self._memory = memoryview(bytearray(PIECE_BYTES))
        self._reported_bytes = 0

    def steps(self) -> Iterator[None]:
        """Steps of the check; between two of them it can be ended."""
        yield from self._versions()
        after: ExtentName | None = None
        while True:
            with self._catalog.reading() as view:
                page = view.extents(after, PAGE_EXTENTS)
            if not page:
                return
            for name, _ in page:
                yield from self._extent(name)
            after = page[-1][0]
            yield

    def _versions(self) -> Iterator[None]:
        """Those that have no bytes, and those that name an extent which the index does not have:
        going through the extents meets neither.
        """
        after: tuple[int, str] | None = None
        while True:
            with self._catalog.reading() as view:
                page = view.every_version(after, PAGE_VERSIONS)
                named = {name for version in page for name in version.extents}
                unknown = {name for name in named if view.extent(name) is None}
            if not page:
                return
            self._findings.objects += sum(not version.extents for version in page)
            for version in page:
                if not unknown.isdisjoint(version.extents):
                    self._findings.add_damaged(version, "the index lacks an extent that it is in")
            yield
            after = (page[-1].bucket_number, page[-1].info.key)
            yield

    def _extent(self, name: ExtentName) -> Iterator[None]:
        """The objects that begin in an extent, all layers of neighbours together."""
        with self._catalog.reading() as view:
            versions = [each for each in view.versions_in(name) if each.extents[0] == name]
            shapes = view.shapes({each for version in versions for each in version.extents})
        if not versions:
            return
        sources, placements = lay_out(versions, shapes)
        opened = SharedOpenObjects(
            self._reader, versions, sources, placements, Verification.FULL, 0
        )
        self._findings.objects += len(versions)
        for reads in _batches(versions, placements):
            size_bytes = sum(read.length_bytes for read in reads)
            try:
                opened.read_many(reads, self._memory)
            except DamagedData:
                self._read_apart(opened, versions)
                return
            self._findings.bytes += size_bytes
            if self._findings.bytes - self._reported_bytes >= PROGRESS_BYTES:
                self._reported_bytes = self._findings.bytes
                yield

    def _read_apart(self, opened: SharedOpenObjects, versions: Sequence[SharedVersion]) -> None:
        """Find those that are damaged."""
        for index, version in enumerate(versions):
            try:
                for offset_bytes in range(0, version.info.size_bytes, PIECE_BYTES):
                    left_bytes = version.info.size_bytes - offset_bytes
                    opened.read_into(index, offset_bytes, self._memory[:left_bytes])
            except DamagedData as damage:
                self._found(version, str(damage))

    def _found(self, version: SharedVersion, reason: str) -> None:
        """Count it, where the index still has it at the log's end, and drop it if it is to be."""
        self._catalog.follow(self._reader.deadline_s())
        with self._catalog.reading() as view:
            if view.row_of(version.name) is None:
                return
        self._findings.add_damaged(version, reason)
        if self._repair:
            error = self._dropping.drop_damaged([version], reason)
            self._findings.dropped += not isinstance(error, NotFound)


def _batches(
    versions: Sequence[SharedVersion], placements: Sequence[Placement]
) -> Iterator[list[Read]]:
    """Reads of all bytes, layer by layer over all versions, of at most `PIECE_BYTES` each."""
    batch: list[Read] = []
    batch_bytes = 0
    for placement, begin_bytes, length_bytes in _rows(versions, placements):
        for offset_bytes in range(0, length_bytes, PIECE_BYTES):
            part_bytes = min(PIECE_BYTES, length_bytes - offset_bytes)
            if batch_bytes + part_bytes > PIECE_BYTES:
                yield batch
                batch, batch_bytes = [], 0
            batch.append(
                Read(placement.source, begin_bytes + offset_bytes, part_bytes, batch_bytes)
            )
            batch_bytes += part_bytes
    if batch:
        yield batch


def _rows(
    versions: Sequence[SharedVersion], placements: Sequence[Placement]
) -> Iterator[tuple[Placement, int, int]]:
    """Contiguous runs of all versions: the first of each, then the second of each, and so on."""
    runs = [
        [(placement, *run) for run in placement.runs(0, version.info.size_bytes)]
        for version, placement in zip(versions, placements, strict=True)
    ]
    for row in itertools.zip_longest(*runs):
        yield from (run for run in row if run is not None)
