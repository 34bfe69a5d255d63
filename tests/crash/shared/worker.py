"""One server of a shared store, driven line by line.

`python -m tests.crash.shared.worker`:

    ADDRESS DATA SETTINGS        its arguments: of the store, a folder, `WorkerSettings` as JSON

    put KEY [PARENT]             store a chunk
    delete KEY, pin KEY
    keys                         of the log's end
    read KEY                     whether its bytes are right
    hold KEY                     open it;  read-held: what has become of it
    round                        one round of upkeep
    status                       `EngineStatus` as JSON
    halt OPERATION [COUNT]       the next (or a later) such call of the store stands still, before
                                 it is carried out, and says so, until the line `go` comes

Answers are lines: `ok`, `error CLASS`, `halted OPERATION`.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from objectcache_schemas.errors import NotFound, ObjectCacheError
from objectcache_schemas.limits import KIB, MIB
from objectcache_storage_server.engines.base import OpenObjects, PrefixShape, StagedPut
from objectcache_storage_server.engines.disk.flush_latch import FlushLatch
from objectcache_storage_server.engines.shared.engine import SharedEngine
from objectcache_storage_server.engines.shared.log.keep_checkpoints import CheckpointRule
from objectcache_storage_server.engines.shared.log.log_catalog import LogCatalog
from objectcache_storage_server.engines.shared.upkeep.upkeep_rules import UpkeepRules
from objectcache_storage_server.engines.shared.upkeep.upkeep_thread import SharedUpkeep
from objectcache_storage_server.engines.stores.open_store import open_store
from objectcache_storage_server.engines.stores.shared_store import SharedStore
from objectcache_storage_server.testing import PassingStore
from tests.contract.engine_suite import BUCKET, content

T = TypeVar("T")

LAYERS, SLICE_BYTES = 2, 4 * KIB
CHUNK_BYTES = LAYERS * SLICE_BYTES
HEARTBEAT_S = 0.2


class WorkerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a story asks of its servers."""

    capacity_bytes: int = 0
    grace_s: float = 1.0
    writer_lease_s: float = 1.5
    checkpoint_records: int = 1 << 40


class HaltingStore(PassingStore):
    """Stands still in a call that was asked for."""

    def __init__(self, inner: SharedStore) -> None:
        super().__init__(inner)
        self.go_on = threading.Event()
        self._operation = ""
        self._calls_before = 0

    def halt(self, operation: str, count: int) -> None:
        """In the call of this operation that comes as the `count`-th."""
        self.go_on.clear()
        self._calls_before = count - 1
        self._operation = operation

    def call(self, operation: str, size_bytes: int, action: Callable[[], T]) -> T:
        is_heartbeat = threading.current_thread().name == "shared-heartbeat"
        if operation == self._operation and not is_heartbeat:
            if self._calls_before:
                self._calls_before -= 1
            else:
                self._operation = ""
                say(f"halted {operation}")
                self.go_on.wait()
        return action()


def say(line: str) -> None:
    """To whoever drives."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def chunk(key: str) -> bytes:
    """What `put` stores."""
    return content(key, CHUNK_BYTES)


class Worker:
    """Carries lines out."""

    def __init__(self, store: HaltingStore, engine: SharedEngine) -> None:
        self._store = store
        self._engine = engine
        self._held: OpenObjects | None = None

    def answer(self, line: str) -> str:
        """One line's answer."""
        command, *arguments = line.split()
        try:
            act = getattr(self, "do_" + command.replace("-", "_"))
            return "ok " + str(act(*arguments) or "")
        except ObjectCacheError as error:
            return f"error {type(error).__name__}"

    def do_put(self, key: str, parent_key: str | None = None) -> None:
        shape = PrefixShape([key], LAYERS, SLICE_BYTES, False, parent_key)
        prefix = self._engine.stage_prefix(BUCKET.name, shape)
        prefix.write(0, memoryview(chunk(key)))
        self._engine.commit([StagedPut(one, "etag") for one in prefix.staged])

    def do_delete(self, key: str) -> int:
        return self._engine.delete(BUCKET.name, [key])

    def do_pin(self, key: str) -> int:
        return self._engine.pin(BUCKET.name, [key], True)

    def do_keys(self) -> str:
        return " ".join(info.key for info in self._engine.scan(BUCKET.name, "", "", 1 << 20))

    def do_read(self, key: str) -> str:
        with self._engine.open_many(BUCKET.name, [key]) as opened:
            return self._compared(opened, key)

    def do_hold(self, key: str) -> None:
        self._held = self._engine.open_many(BUCKET.name, [key])

    def do_read_held(self) -> str:
        assert self._held is not None
        info = self._held.infos[0]
        assert info is not None
        return self._compared(self._held, info.key)

    def _compared(self, opened: OpenObjects, key: str) -> str:
        if opened.infos[0] is None:
            raise NotFound(key)
        memory = memoryview(bytearray(CHUNK_BYTES))
        opened.read_into(0, 0, memory)
        return "right" if memory == chunk(key) else "wrong"

    def do_round(self) -> None:
        self._engine.upkeep.round()

    def do_status(self) -> str:
        return msgspec.json.encode(self._engine.status()).decode()

    def do_check(self) -> str:
        report = self._engine.check(False, lambda _: True)
        return msgspec.json.encode(report).decode()

    def do_halt(self, operation: str, count: str = "1") -> None:
        self._store.halt(operation, int(count))


def main(address: str, data_folder: str, settings_text: str) -> None:
    """Serve lines until there are no more. One that comes while another is carried out is `go`."""
    settings = msgspec.json.decode(settings_text, type=WorkerSettings)
    rules = UpkeepRules(
        capacity_bytes=settings.capacity_bytes,
        high_watermark=0.75,
        low_watermark=0.5,
        grace_s=settings.grace_s,
        writer_lease_s=settings.writer_lease_s,
    )
    store = HaltingStore(open_store(address, create=True))
    catalog = LogCatalog(
        store,
        Path(data_folder),
        index_bytes_max=64 * MIB,
        heartbeat_s=HEARTBEAT_S,
        checkpoint_rule=CheckpointRule(records=settings.checkpoint_records, records_kept=0),
    )
    upkeep = SharedUpkeep(catalog, store, rules, round_s=None)
    engine = SharedEngine(catalog, store, upkeep, MIB, FlushLatch(), lambda: None)
    with contextlib.suppress(ObjectCacheError):  # another server was first
        engine.create_bucket(BUCKET)
    worker = Worker(store, engine)
    say("ready")
    thread: threading.Thread | None = None
    for line in sys.stdin:
        if line.strip() == "go":
            store.go_on.set()
            continue
        if thread is not None:
            thread.join()
        thread = threading.Thread(target=lambda line=line: say(worker.answer(line)), daemon=True)
        thread.start()


if __name__ == "__main__":
    main(*sys.argv[1:])
