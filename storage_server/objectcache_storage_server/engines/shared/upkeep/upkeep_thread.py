"""The one background thread of a shared store's upkeep on this server.

Every server fences those that are silent. The one that holds the upkeep lease evicts and expires,
empties the graveyard, sweeps leftovers and takes checkpoints; all that it says by records is judged
at the log's end, where it must still hold the lease. A step that fails keeps no other from its
turn.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from objectcache_schemas.errors import ObjectCacheError, StorageFull
from objectcache_storage_server.engines.shared.log.log_catalog import LogCatalog
from objectcache_storage_server.engines.shared.upkeep.empty_graveyard import Graveyard
from objectcache_storage_server.engines.shared.upkeep.evict_extents import ExtentEvictor
from objectcache_storage_server.engines.shared.upkeep.expire_objects import Expiry
from objectcache_storage_server.engines.shared.upkeep.lead_upkeep import NotLeading, UpkeepLead
from objectcache_storage_server.engines.shared.upkeep.log_ages import LogAges
from objectcache_storage_server.engines.shared.upkeep.sweep_leftovers import LeftoverSweep
from objectcache_storage_server.engines.shared.upkeep.upkeep_rules import UpkeepRules
from objectcache_storage_server.engines.stores.shared_store import SharedStore

ROUND_S = 1.0
CALL_S = 10.0  # for a small record
COMPLAIN_EVERY_S = 60.0  # about one step: what fails fails every second
GRACE_PART = 20  # of the grace, after which the graveyard is looked at again
GRAVEYARD_S_MIN, GRAVEYARD_S_MAX = 0.2, 30.0

log = logging.getLogger("objectcache.storage_server.engines.shared")


class SharedUpkeep:
    """Runs rounds until it is closed; `round` may also be called directly."""

    def __init__(
        self,
        catalog: LogCatalog,
        store: SharedStore,
        rules: UpkeepRules,
        wall_clock: Callable[[], float] = time.time,
        round_s: float | None = ROUND_S,
    ) -> None:
        """`round_s`: between two rounds; None has nobody but callers of `round` do anything."""
        self.rules = rules
        self.evictor = ExtentEvictor(catalog, rules)
        self.ages = LogAges()
        self.lead = UpkeepLead(catalog, rules.writer_lease_s)
        self.sweep = LeftoverSweep(catalog, store, self.lead)
        self.expiry = Expiry(catalog, self.ages, wall_clock)
        self.freed_bytes = 0  # of the graveyard, since the start
        self._catalog = catalog
        self._graveyard = Graveyard(catalog, store, self.lead)
        self._graveyard_s = float("-inf")
        self._has_no_room = False  # for a record, in this round
        self._round_s = round_s
        self._one_round = threading.Lock()
        self._complained_s: dict[str, float] = {}  # by step
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shared-upkeep", daemon=True)
        if round_s is not None:
            self._thread.start()

    def __repr__(self) -> str:
        return f"<SharedUpkeep of {self._catalog!r}>"

    def close(self) -> None:
        """End once what is under way has come to its next record or page of objects."""
        self._closing.set()
        self.lead.stop()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(self._round_s):
            self.round()

    def round(self, now_s: float | None = None) -> None:
        """One round of all that is due. Raises nothing: what fails is logged. `now_s` is on the
        clock of `time.monotonic`.
        """
        with self._one_round:
            self._round(time.monotonic() if now_s is None else now_s)

    def _round(self, now_s: float) -> None:
        self._has_no_room = False
        self._step("looking at the log", now_s, lambda: self._note_end(now_s))
        self.evictor.forget_full(now_s)
        self._step("fencing", now_s, self._fence)
        if not self._step("taking the upkeep lease", now_s, self._claim):
            if self._has_no_room:
                self._step("making room", now_s, lambda: self._make_room(now_s))
            return
        change = self.lead.change
        self._step("expiry", now_s, lambda: self.expiry.expire(change, now_s))
        self._step("eviction", now_s, lambda: self.evictor.keep_below_watermark(change))
        self._step("emptying the graveyard", now_s, lambda: self._empty_graveyard(now_s))
        self._step("a checkpoint", now_s, lambda: self._catalog.keep_checkpoint(now_s))

    def _step(self, name: str, now_s: float, action: Callable[[], object]) -> bool:
        """Whether it answered with something true, and without an error."""
        if self._closing.is_set():
            return False
        try:
            return bool(action())
        except NotLeading:
            log.info("%s ends: the upkeep lease is not this server's any more", name)
        except ObjectCacheError as error:
            self._has_no_room |= isinstance(error, StorageFull)
            if self._may_complain(name, now_s):
                log.warning("upkeep goes on after %s failed: %s", name, error)
        except Exception:
            if self._may_complain(name, now_s):
                log.exception("upkeep goes on after a defect in %s", name)
        return False

    def _may_complain(self, about: str, now_s: float) -> bool:
        if now_s - self._complained_s.get(about, float("-inf")) < COMPLAIN_EVERY_S:
            return False
        self._complained_s[about] = now_s
        return True

    def _note_end(self, now_s: float) -> None:
        with self._catalog.reading() as view:
            self.ages.saw(view.state.end, now_s)

    def _fence(self) -> None:
        self.lead.fence_the_silent(time.monotonic() + CALL_S)

    def _claim(self) -> bool:
        return self.lead.claim(time.monotonic() + CALL_S)

    def _empty_graveyard(self, now_s: float) -> None:
        """And sweep: both are of what was dead for longer than the grace."""
        end = self._due_end(now_s)
        if end is not None:
            self.freed_bytes += self._graveyard.empty(end)
            self.sweep.sweep(end)

    def _make_room(self, now_s: float) -> None:
        """For a server that can neither fence who held the lease nor take it."""
        end = self._due_end(now_s)
        if end is not None:
            self._graveyard.delete_objects(end)

    def _due_end(self, now_s: float) -> int | None:
        """What records below it buried has been dead for the grace; none before the next look."""
        grace_s = self.rules.grace_s
        if now_s < self._graveyard_s:
            return None
        wait_s = min(max(grace_s / GRACE_PART, GRAVEYARD_S_MIN), GRAVEYARD_S_MAX)
        self._graveyard_s = now_s + wait_s
        return self.ages.end_before(grace_s, now_s)
