"""The servers of a shared store, as its log says: each tells of itself with its heartbeats."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

import msgspec

from objectcache_schemas.errors import ObjectCacheError
from objectcache_schemas.operators.server_list import ServerState
from objectcache_storage_server.engines.shared.log.log_catalog import LogCatalog
from objectcache_storage_server.fleet.server_directory import ServerDirectory

SILENT_S_MAX = 12.0  # without a record of it, after which a server is not told of any more
LOOK_INTERVAL_S = 0.5  # between two looks at the index

logger = logging.getLogger("objectcache.storage_server.fleet")
_decode = msgspec.msgpack.Decoder(ServerState).decode


class SharedDirectory(ServerDirectory):
    """Servers are known by their writer's number. Whether one lives is judged by this server's own
    clock: by when its newest record was first seen.
    """

    def __init__(self, catalog: LogCatalog) -> None:
        self._catalog = catalog
        self._lock = threading.Lock()
        self._told: ServerState | None = None
        self._seen: dict[int, tuple[int, float]] = {}  # writer: its newest record, and since when
        self._others: Sequence[ServerState] = ()
        self._looked_s = -LOOK_INTERVAL_S

    def others(self) -> Sequence[ServerState]:
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._looked_s >= LOOK_INTERVAL_S:
                self._looked_s = now_s
                try:
                    self._look(now_s)
                except ObjectCacheError as error:
                    logger.debug("the servers cannot be looked up: %s", error)
            return self._others

    def _look(self, now_s: float) -> None:
        with self._catalog.reading() as view:
            rows = view.writers()
        is_first = not self._seen
        others: list[ServerState] = []
        for writer, row in rows.items():
            record, since_s = self._seen.get(writer, (-1, now_s))
            if record != row.last_record:
                # What is there at the start may be long dead: it has to say something first.
                since_s = now_s - SILENT_S_MAX / 2 if is_first else now_s
                self._seen[writer] = (row.last_record, since_s)
            silent_s = now_s - since_s
            is_other = self._told is None or writer != self._told.writer
            if is_other and row.fenced_by is None and row.document and silent_s < SILENT_S_MAX:
                others.append(_state(row.document, silent_s))
        for writer in self._seen.keys() - rows.keys():
            del self._seen[writer]
        own_id = self._told.server_id if self._told is not None else b""
        self._others = tuple(one for one in others if one.server_id != own_id)

    def tell(self, state: ServerState) -> None:
        """What changes all the time is left out: gateways ask each server for it."""
        known = _lasting(state)
        with self._lock:
            before, self._told = self._told, state
        if before is None or known != _lasting(before):
            self._catalog.describe_server(msgspec.msgpack.encode(known))

    def __repr__(self) -> str:
        return f"<SharedDirectory {len(self._others)} others>"


def _lasting(state: ServerState) -> ServerState:
    return msgspec.structs.replace(
        state,
        load=0,
        in_flight_bytes=0,
        recent_bytes=0,
        recent_requests=0.0,
        lag_records=0,
        lag_is_known=True,
        writer=0,
        store_failure="",
    )


def _state(document: bytes, silent_s: float) -> ServerState:
    return msgspec.structs.replace(_decode(document), heard_s=silent_s)
