"""Blocks on their way to the store: copied out of vLLM's memory layer by layer, put behind it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from objectcache.connectors.vllm.plans import SavePlan
from objectcache.connectors.vllm.store import Complaints
from objectcache.connectors.vllm.worker.arena import Arena
from objectcache.connectors.vllm.worker.block_copies import BlockCopies, BlocksOut, HostArrival
from objectcache.connectors.vllm.worker.staging import SlotStaging
from objectcache.payload import Bytes

logger = logging.getLogger("objectcache.connectors.vllm")
PIECE_BLOCKS_MAX = 64  # of one put: it becomes visible, and its memory free, as a whole
CLOSE_TIMEOUT_S = 10.0
UNSTORED_MAX = 65_536  # blocks that are told of at the next step


@dataclass(slots=True)
class SavePiece:
    """A run of one request's blocks, and the run of slots that it is staged in."""

    block_ids: tuple[int, ...]
    hashes: tuple[bytes, ...]
    parent: bytes | None
    slot: int
    weights: str
    staged: set[int] = field(default_factory=set[int])  # layers
    arrivals: list[HostArrival] = field(default_factory=list[HostArrival])  # of what is staged
    dropped: bool = False


def pieces(plan: SavePlan) -> list[tuple[tuple[int, ...], tuple[bytes, ...], bytes | None]]:
    """A request's blocks in pieces that are put together, each with the hash before it."""
    cut = []
    for begin in range(0, len(plan.hashes), PIECE_BLOCKS_MAX):
        end = begin + PIECE_BLOCKS_MAX
        parent = plan.hashes[begin - 1] if begin else plan.parent
        cut.append((plan.block_ids[begin:end], plan.hashes[begin:end], parent))
    return cut


class Saves:
    """Stages what each step saves, holds it until the step is known to be good, and puts it.

    Called from the worker's thread; a thread of its own puts. Memory is the staging memory alone:
    what finds no room in it is dropped and counted, ends of prefixes first.
    """

    def __init__(
        self,
        put: Callable[[SavePiece, Bytes], None],
        copies: BlockCopies,
        staging: SlotStaging,
    ) -> None:
        """`put` stores a piece out of its slots in `staging`, into which `copies` go."""
        self._put = put
        self._copies = copies
        self._staging = staging
        self._arena = Arena(staging.slot_count)
        self._draining = False  # until nothing is in a slot any more
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._step: list[SavePiece] = []
        self._held: dict[int, list[SavePiece]] = {}
        self._queue: queue.SimpleQueue[SavePiece | None] = queue.SimpleQueue()
        self._complaints = Complaints(logger, "storing KV failed, it is not kept")
        self.saved_blocks = 0
        self.dropped_blocks = 0
        self._unstored: list[bytes] = []
        self._thread = threading.Thread(target=self._run, name="objectcache-save", daemon=True)
        self._thread.start()

    @property
    def failures(self) -> int:
        """Puts that failed."""
        return self._complaints.count

    # --- the worker's thread ---

    def start(self, plans: Sequence[SavePlan]) -> None:
        """A step begins that saves these blocks."""
        assert not self._step
        for plan in plans:
            self._stage(plan)

    def _stage(self, plan: SavePlan) -> None:
        left = len(plan.hashes)
        for block_ids, hashes, parent in pieces(plan):
            with self._lock:
                slot = None if self._draining else self._arena.take(len(hashes))
            if slot is None:
                self._forget(plan.hashes[-left:])
                return
            self._step.append(SavePiece(block_ids, hashes, parent, slot, plan.weights))
            left -= len(hashes)

    def save(self, layer: int) -> None:
        """A layer of the step's blocks is computed: copy it out of them."""
        moves = [BlocksOut(piece.block_ids, self._slots(piece)[:, layer]) for piece in self._step]
        arrival = self._copies.save(layer, moves) if moves else None
        for piece in self._step:
            if arrival is not None:
                piece.arrivals.append(arrival)
            piece.staged.add(layer)

    def end_step(self, step: int) -> None:
        """The step is computed; its blocks may be used for something else."""
        whole = [piece for piece in self._step if len(piece.staged) == len(self._copies.layers)]
        for piece in self._step:
            if len(piece.staged) < len(self._copies.layers):
                self._drop(piece)
        self._step = []
        if whole:
            self._held[step] = whole

    def decided(self, good: Sequence[int], bad: Sequence[int]) -> None:
        """Put what good steps computed, and forget what bad ones did."""
        for step in bad:
            for piece in self._held.pop(step, ()):
                self._drop(piece)
        for step in good:
            for piece in self._held.pop(step, ()):
                self._queue.put(piece)

    def _drop(self, piece: SavePiece) -> None:
        self._forget(piece.hashes)
        if piece.arrivals:  # its slots may be written still
            piece.dropped = True
            self._queue.put(piece)
        else:
            self._free(piece)

    def _forget(self, hashes: Sequence[bytes]) -> None:
        self.dropped_blocks += len(hashes)
        self._tell_unstored(hashes)

    def take_unstored(self) -> tuple[bytes, ...]:
        """Hashes of blocks that were to be stored and are not; each is told once."""
        with self._lock:
            unstored, self._unstored = self._unstored, []
        return tuple(unstored)

    # --- both ---

    def _tell_unstored(self, hashes: Sequence[bytes]) -> None:
        with self._lock:
            self._unstored += hashes
            del self._unstored[:-UNSTORED_MAX]

    def _slots(self, piece: SavePiece) -> Bytes:
        return self._staging.slots[piece.slot : piece.slot + len(piece.hashes)]

    def _free(self, piece: SavePiece) -> None:
        with self._changed:
            self._arena.give_back(piece.slot, len(piece.hashes))
            self._changed.notify_all()

    # --- the thread that puts ---

    def _run(self) -> None:
        while (piece := self._queue.get()) is not None:
            try:
                failure = self._arrive(piece)
                if piece.dropped:
                    continue
                if failure is not None:
                    raise failure
                self._put(piece, self._slots(piece))
                self.saved_blocks += len(piece.hashes)
            except Exception as error:  # it must not end the thread
                self._complaints.add(error)
                self._tell_unstored(piece.hashes)
            finally:
                self._renew_after(piece)

    def _arrive(self, piece: SavePiece) -> Exception | None:
        """Wait until nothing is on its way into the piece's slots; what has failed of it."""
        failure: Exception | None = None
        for arrival in piece.arrivals:
            try:
                arrival.wait()
            except Exception as error:
                failure = error
        piece.arrivals.clear()
        return failure

    def _renew_after(self, piece: SavePiece) -> None:
        """Free a piece's slots; where no slot may be used again, take other memory once all that
        is staged is gone from this one.
        """
        with self._lock:
            spoilt = self._draining or self._staging.is_spoilt
            better = self._staging.could_be_better and self._in_use() == len(piece.hashes)
            self._draining = spoilt or better
        self._free(piece)
        with self._lock:
            renews = self._draining and self._in_use() == 0
        if renews:
            self._staging.renew()
            with self._lock:
                self._draining = False

    def _in_use(self) -> int:
        return self._arena.slot_count - self._arena.free_count

    def wait_stored(self, timeout_s: float) -> bool:
        """Wait until nothing is staged any more; False when that took longer."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._arena.free_count == self._arena.slot_count, timeout_s
            )

    def close(self) -> None:
        """Put what is decided, forget the rest."""
        self.decided((), tuple(self._held))
        self._queue.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        self._staging.close()

    def __repr__(self) -> str:
        return (
            f"<Saves {self.saved_blocks} blocks, {self.dropped_blocks} dropped, "
            f"{self.failures} puts failed, {self._arena!r}>"
        )
