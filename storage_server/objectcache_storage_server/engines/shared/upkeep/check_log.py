"""Checks what the next server that starts will read: the log's records, and the checkpoints.

A server that runs has replayed a record once and does not look at it again, so nobody else would
notice one that is lost or damaged since. Records that come while the check runs are the next one's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from objectcache_schemas.errors import DamagedData
from objectcache_schemas.limits import MIB
from objectcache_storage_server.engines.shared.index.index_state import IndexState
from objectcache_storage_server.engines.shared.log.checkpoint_files import (
    DamagedCheckpoint,
    check_checkpoint,
    checkpoint_number,
    manifest_names,
)
from objectcache_storage_server.engines.shared.log.log_catalog import LogCatalog
from objectcache_storage_server.engines.shared.log.log_records import (
    UnreadableRecord,
    record_checksum,
    unpack_record,
)
from objectcache_storage_server.engines.shared.operations import split_operations
from objectcache_storage_server.engines.shared.upkeep.check_findings import CheckFindings
from objectcache_storage_server.engines.stores.shared_store import (
    LostObject,
    SharedStore,
    TrimmedLog,
)

READ_BYTES = 4 * MIB  # of records at a time


class LogCheck:
    """One check of the log; used by one thread."""

    def __init__(
        self,
        store: SharedStore,
        catalog: LogCatalog,
        deadline_s: Callable[[], float],
        findings: CheckFindings,
    ) -> None:
        """`deadline_s`: of a call of the store that begins now."""
        self._store = store
        self._catalog = catalog
        self._deadline_s = deadline_s
        self._findings = findings
        self._store_id = b""  # until one is known
        self._first = 0  # record that is kept
        self._before: int | None = None  # checksum of the record before, where that was read

    def steps(self) -> Iterator[None]:
        """Steps of the check; between two of them it can be ended. Raises `StoreTimeout`,
        `Unavailable`.
        """
        state = self._state()
        if state is not None:
            self._store_id = state.store_id
        end = self._store.log_end(0, self._deadline_s()) if state is None else state.end
        yield from self._records(end)
        if state is not None and self._before not in (None, state.checksum):
            self._findings.add_bad_record(
                f"record {end - 1} of the log is not the one that this server has replayed"
            )
        yield from self._checkpoints()

    def _state(self) -> IndexState | None:
        """Of the index at the log's end; none where a record cannot be followed."""
        try:
            self._catalog.follow(self._deadline_s())
            with self._catalog.reading() as view:
                return view.state
        except UnreadableRecord:
            return None

    # --- records ---

    def _records(self, end: int) -> Iterator[None]:
        number = 0
        missing = 0  # records before this one
        while number < end:
            try:
                found = self._store.read_log(number, READ_BYTES, self._deadline_s())
            except TrimmedLog as trimmed:
                number = self._first = trimmed.first
                self._before, missing = None, 0
                continue
            except DamagedData as damage:
                self._findings.add_bad_record(f"{damage.message}; what follows was not read")
                self._before = None
                return
            if found:
                self._note_missing(number, missing)
                missing = 0
                self._check(number, found[: end - number])
                number += len(found)
            else:
                missing, number, self._before = missing + 1, number + 1, None
            yield
        self._note_missing(end, missing)

    def _note_missing(self, before: int, count: int) -> None:
        if count == 1:
            self._findings.add_bad_record(f"record {before - 1} of the log is not there")
        elif count:
            self._findings.add_bad_record(
                f"records {before - count} to {before - 1} of the log are not there", count
            )

    def _check(self, first: int, found: Sequence[bytes]) -> None:
        for number, packed in enumerate(found, first):
            self._findings.records += 1
            try:
                self._check_record(number, packed)
            except UnreadableRecord as error:
                self._findings.add_bad_record(error.message)
                self._before = None

    def _check_record(self, number: int, packed: bytes) -> None:
        """Raises `UnreadableRecord`."""
        record = unpack_record(packed, number)
        self._store_id = self._store_id or record.store_id
        where = f"record {number} of the log"
        if record.store_id != self._store_id:
            raise UnreadableRecord(f"{where} is of the store {record.store_id.hex()}")
        if self._before not in (None, record.previous):
            raise UnreadableRecord(f"{where} does not follow the record before it")
        try:
            split_operations(record.body)
        except msgspec.MsgspecError as error:
            raise UnreadableRecord(
                f"{where} says something that this server does not know: {error}"
            ) from error
        self._before = record_checksum(packed)

    # --- checkpoints ---

    def _checkpoints(self) -> Iterator[None]:
        """Read them all. Where the log has been trimmed, a whole one has to come so far."""
        is_enough = self._first == 0
        for name in manifest_names(self._store, self._deadline_s()):
            try:
                check_checkpoint(self._store, name, self._store_id)
                is_enough |= checkpoint_number(name) >= self._first
            except (DamagedCheckpoint, LostObject) as error:
                if name in manifest_names(self._store, self._deadline_s()):
                    self._findings.add_bad_record(f"a checkpoint cannot be read: {error}")
                else:
                    is_enough = True  # there is a newer one by now
            yield
        if not is_enough:
            self._findings.add_bad_record(
                f"the log begins with record {self._first}, and no whole checkpoint comes so far: "
                f"no server can be added"
            )
