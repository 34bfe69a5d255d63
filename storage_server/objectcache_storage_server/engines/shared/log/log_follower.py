"""The thread that keeps the index at the log's end, and makes it again where that is needed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from objectcache_schemas.errors import ObjectCacheError, Unavailable
from objectcache_storage_server.engines.shared.index.apply_record import Touched
from objectcache_storage_server.engines.shared.log.open_index import IndexOpener
from objectcache_storage_server.engines.shared.log.replay import LogReplay
from objectcache_storage_server.engines.shared.log.writers.own_writer import OwnWriter
from objectcache_storage_server.engines.shared.log.writers.writer_watch import WriterWatch
from objectcache_storage_server.engines.stores.shared_store import SharedStore

OPEN_S_MAX = 600.0  # until a log is replayed
RENEWALS_MAX = 3  # while a store is opened
ASK_S = 1.0  # between two looks at the log without a bell
CLOSING_S = 0.05  # after which a thread that is still there is woken again
BEHIND_S_MAX = 5.0  # without having been at the log's end; more is a server that is cut off
WATCH_S = 0.5  # between two looks at who was heard

log = logging.getLogger("objectcache.storage_server.engines.shared")


class LogFollower:
    """Follows, watches the other writers, and tells listeners what was changed."""

    def __init__(
        self,
        store: SharedStore,
        opener: IndexOpener,
        own: OwnWriter,
        on_fenced: Callable[[], None],
        deadline_s: float,
        call_s_max: float,
    ) -> None:
        """Open the index, which is not followed yet. `on_fenced`: this server has another writer.
        `call_s_max`: for what it asks of the store.

        Raises `StorageFull`, `StoreTimeout`, `Unavailable`.
        """
        self._store = store
        self._opener = opener
        self._own = own
        self._on_fenced = on_fenced
        self._call_s_max = call_s_max
        self._lock = threading.Lock()  # of what follows
        self._pending = Touched()  # what listeners are to be told
        self._listeners: list[Callable[[Touched], None]] = []
        self._watch = WriterWatch()
        self._watched_s = 0.0  # when it was last looked at who was heard
        self._asked_s = 0.0  # when the log's end was last asked for
        self.failure = ""  # of the last look, which was logged
        self.end_seen = 0  # of the log, as far as it was seen
        self.at_end_s = time.monotonic()  # when the index was last known to be at the log's end
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shared-log", daemon=True)
        self.replay = LogReplay(store, opener, opener.opened(deadline_s), self._note_applied)

    def start(self, deadline_s: float) -> None:
        """Follow to the log's end, and from then on. Raises as the opening does."""
        for _ in range(RENEWALS_MAX):
            try:
                begun_s = time.monotonic()
                self.replay.follow_to(self.ask_end(deadline_s), deadline_s)
                self._is_at_end(begun_s)
                break
            except Unavailable:
                if not self._is_to_renew:
                    raise
            self._renew()
        self._thread.start()

    def close(self) -> None:
        """End, and close the index once every look-up has ended."""
        self._is_closing.set()
        while self._thread.is_alive():
            self._store.end_waits()  # again, where it had only been about to wait
            self._thread.join(CLOSING_S)
        self.replay.close()

    def ask_end(self, deadline_s: float) -> int:
        """The number of the next record of the log. Raises `StoreTimeout`, `Unavailable`."""
        return self._store.log_end(self.replay.end, deadline_s)

    @property
    def heard_s(self) -> float:
        """When the log's end was last known, by the monotonic clock."""
        return max(self._asked_s, self.at_end_s)

    def listen(self, listener: Callable[[Touched], None]) -> None:
        """Call it after records were applied, from this thread."""
        self._listeners.append(listener)

    def silent(self, lease_s: float) -> list[int]:
        """Writers that are not fenced and have appended nothing for longer than this."""
        with self._lock:
            return self._watch.silent(lease_s)

    def _note_applied(self, touched: Touched) -> None:
        with self._lock:
            self._pending.add(touched)
        if self._own.number in touched.fenced:
            self._own.renew()
            self._on_fenced()

    # --- the thread ---

    def _run(self) -> None:
        while not self._is_closing.is_set():
            self._try_to_follow()
            self._tell_listeners()

    def _try_to_follow(self) -> None:
        """Apply what there is; what fails is logged once, and tried again a second later."""
        try:
            self._store.wait_for_record(self.replay.end, ASK_S)
            if self._is_closing.is_set():
                return
            self._follow()
        except ObjectCacheError as error:
            if self._is_closing.is_set():
                return
            if str(error) != self.failure:
                log.warning("could not follow the shared store's log: %s", error)
            self._note_failure(str(error))
        except Exception as error:  # a defect; the others are to be followed all the same
            log.exception("could not follow the shared store's log")
            self._note_failure(f"a defect: {error!r}")
        else:
            self.failure = ""

    def _note_failure(self, failure: str) -> None:
        """Let it be seen how far behind this server falls, and wait before the next try."""
        self.failure = failure
        try:
            self._note_end(time.monotonic() + self._call_s_max)
        except Exception as error:  # what was seen before has to do
            log.debug("the shared store's log was not asked for its end: %s", error)
        self._is_closing.wait(ASK_S)

    def _note_end(self, deadline_s: float) -> None:
        """Ask for the log's end, once a second at most."""
        now_s = time.monotonic()
        if now_s - self._asked_s >= ASK_S:
            self.end_seen = max(self.end_seen, self.ask_end(deadline_s))
            self._asked_s = now_s

    def _is_at_end(self, since_s: float) -> None:
        """The log was asked then for what follows, and all of it is in the index."""
        self.at_end_s = since_s
        self.end_seen = max(self.end_seen, self.replay.end)

    @property
    def _is_to_renew(self) -> bool:
        return bool(self.replay.renewal_reason) or self.replay.damage is not None

    def _follow(self) -> None:
        if self._is_to_renew:
            self._renew()
        begun_s = time.monotonic()
        while self.replay.follow_some(begun_s + self._call_s_max):
            self._tell_listeners()
            if self._is_closing.is_set():
                return
            if self.replay.end >= self.end_seen:
                self.at_end_s = max(self.at_end_s, self._asked_s)
            begun_s = time.monotonic()
            self._note_end(begun_s + self._call_s_max)
        self._is_at_end(begun_s)
        self._watch_writers()

    def _renew(self) -> None:
        """Make the index again, and use it once it has come to the log's end."""
        deadline_s = time.monotonic() + OPEN_S_MAX
        replay = self.replay
        if replay.is_damaged:
            self._opener.distrust(replay.index)
        if replay.damage is not None:
            index = self._opener.made_beyond(replay.damage, deadline_s)
        else:
            index = self._opener.made(deadline_s)
        try:
            replay.renew(index, deadline_s, self._is_closing.is_set)
        except BaseException:
            index.close()
            self._opener.discard(index)
            raise

    def _watch_writers(self) -> None:
        """Note who was heard; the log was followed to its end."""
        now_s = time.monotonic()
        if now_s - self._watched_s < WATCH_S:
            return
        self._watched_s = now_s
        with self.replay.reading() as view:
            heard = {
                writer: row.last_record
                for writer, row in view.writers().items()
                if row.fenced_by is None and writer != self._own.number
            }
        with self._lock:
            self._watch.saw(heard, now_s)

    def _tell_listeners(self) -> None:
        with self._lock:
            touched, self._pending = self._pending, Touched()
        if not touched:
            return
        for listener in self._listeners:
            try:
                listener(touched)
            except Exception:
                log.exception("a listener of the shared store's log failed")
