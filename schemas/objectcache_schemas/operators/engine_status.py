"""The engine's state and checks of it, as operators see them."""

from __future__ import annotations

import msgspec

from objectcache_schemas.messages.message import Changes, Message, request


class ExtentClass(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The extents with one number of slots."""

    slots: int
    count: int
    live_slots: int  # that hold a chunk
    bytes: int


class PathStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One way from the device to memory, since the start."""

    name: str  # "page_cache" or "direct"
    extents: int
    extent_bytes: int
    read_bytes: int
    hit_bytes: int  # of `read_bytes`, found in memory
    overlap: str  # "intra", "cross" or "measuring"
    intra_bytes_per_s: float | None  # as last measured
    cross_bytes_per_s: float | None


class CacheStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Objects of a shared store on a device of the server that answers, since its start."""

    failure: str = ""  # why it is off until a restart; empty while all is well
    capacity_bytes: int = 0
    used_bytes: int = 0  # of slots, which may be in part empty
    hits: int = 0  # reads of an object that it answered
    hit_bytes: int = 0
    misses: int = 0  # that the store was asked for
    miss_bytes: int = 0
    written_bytes: int = 0
    passed_over_bytes: int = 0  # that it would have kept, and had no memory for
    evicted_objects: int = 0  # of the store
    damaged_objects: int = 0  # that it let go because what was read did not match its checksums


class SharedStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A store that several servers share, as the one that answers has replayed its log."""

    extents: int = 0  # that some object lies in
    buried_extents: int = 0  # without objects, whose bytes are there until the grace has passed
    buried_bytes: int = 0
    freed_bytes: int = 0  # by this server, of such extents, since its start
    swept_objects: int = 0  # of the store, that dead servers had left; by this one, since its start
    log_end: int = 0  # number of the next record
    lag_records: int = 0  # that this server has heard of and not replayed
    lag_is_known: bool = True  # false where it cannot tell what the log ends with
    failure: str = ""  # why it cannot do all that needs the store; empty while it can
    behind_s: float = 0.0  # since it was last known to be at the log's end; it looks every second
    lost_races: int = 0  # since the start: records of others that came before one of this server
    checkpoint: int = 0  # number of the first record that the newest one lacks; 0 is none
    writers: int = 0  # servers that live, as far as is known
    fenced_writers: int = 0  # that were taken for dead, and whose leftovers are not deleted yet
    leads_upkeep: bool = False  # it is this server that evicts and deletes
    cache: CacheStatus | None = None  # of this server; none by default


class EngineStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The state of an engine. An engine without extents says only its name."""

    engine: str
    objects: int = 0
    damaged: int = 0  # objects dropped since the start
    flush_failure: str = ""  # why nothing is stored until a restart; empty while all is well
    capacity_bytes: int = 0  # that extents may take
    allocated_bytes: int = 0  # of extents
    live_bytes: int = 0  # of objects
    encoded_bytes: int = 0  # of extents whose slices are encoded
    decoded_bytes: int = 0  # of the slices that they have room for
    free_bytes: int = 0  # of the data files, between extents
    largest_free_bytes: int = 0  # in one run
    data_files: int = 0
    extents: tuple[ExtentClass, ...] = ()
    page_cache_budget_bytes: int = 0
    page_cache_budget_source: str = (
        ""  # what set it: "cgroup v2", "cgroup v1", "meminfo", "setting"
    )
    paths: tuple[PathStatus, ...] = ()
    device_path: str = ""  # "io_uring", "threads" or "nvme", and why
    cache_path: str = ""  # whose page cache it is, or why there is none
    stale_reads: int = (
        0  # since the start: pieces that the page cache had otherwise than the device
    )
    unflushed_extents: int = 0  # of buckets with asynchronous durability
    evicted_objects: int = 0
    evicted_bytes: int = 0
    expired_objects: int = 0
    compacted_objects: int = 0
    compacted_bytes: int = 0
    compaction: str = ""  # "idle", "off", or what it is doing
    compaction_candidates: int = 0  # objects that could lie better
    encoding_waiting_bytes: int = 0  # of chunks that lie well, and not as their policy's encoding
    reencoded_objects: int = 0  # of such, since the start
    reencoded_bytes: int = 0
    when_full: str = ""  # "evict" or "refuse"
    shared: SharedStatus | None = None


class EngineState(Message, frozen=True):
    """Reply to `GetEngineStatus`."""

    status: EngineStatus


@request(EngineState, repeatable=False, changes=Changes.NOTHING)
class GetEngineStatus(Message, frozen=True):
    """Ask for the engine's state."""


class CheckpointTaken(Message, frozen=True):
    """Reply to `TakeCheckpoint`: a checkpoint of a shared store's index."""

    number: int  # of the first record that it lacks
    size_bytes: int
    taken_s: float  # for it


@request(CheckpointTaken, repeatable=False, changes=Changes.NOTHING)
class TakeCheckpoint(Message, frozen=True):
    """Take a checkpoint now, and trim the log behind the one before it."""


class CheckReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a check has found so far."""

    objects: int = 0  # that were checked
    bytes: int = 0
    damaged: int = 0  # objects whose bytes do not match their checksums
    misplaced: int = 0  # objects or extents whose place is impossible, or taken twice
    leaked_bytes: int = 0  # space that no object uses and no free run holds
    dropped: int = 0  # objects that were repaired away
    log_records: int = 0  # of a shared store's log, that were read
    bad_log_records: int = 0  # of these, and checkpoints, that are missing, damaged or out of order
    examples: tuple[str, ...] = ()  # what was found, in words; the first 20


class CheckProgress(Message, frozen=True):
    """A check goes on."""

    report: CheckReport


class CheckEnded(Message, frozen=True):
    """A check is through."""

    report: CheckReport


@request(CheckProgress, CheckEnded, repeatable=False, changes=Changes.NOTHING)
class CheckEngine(Message, frozen=True):
    """Check the store. Replies: `CheckProgress` any number of times, then `CheckEnded`.

    Closing the connection ends the check.
    """

    repair: bool
