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


class EngineStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The state of an engine. An engine without extents says only its name."""

    engine: str
    objects: int = 0
    damaged: int = 0  # objects dropped since the start
    flush_failure: str = ""  # why nothing is stored until a restart; empty while all is well
    capacity_bytes: int = 0  # that extents may take
    allocated_bytes: int = 0  # of extents
    live_bytes: int = 0  # of objects
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
    when_full: str = ""  # "evict" or "refuse"


class EngineState(Message, frozen=True):
    """Reply to `GetEngineStatus`."""

    status: EngineStatus


@request(EngineState, repeatable=False, changes=Changes.NOTHING)
class GetEngineStatus(Message, frozen=True):
    """Ask for the engine's state."""


class CheckReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a check has found so far."""

    objects: int = 0  # that were checked
    bytes: int = 0
    damaged: int = 0  # objects whose bytes do not match their checksums
    misplaced: int = 0  # objects or extents whose place is impossible, or taken twice
    leaked_bytes: int = 0  # space that no object uses and no free run holds
    dropped: int = 0  # objects that were repaired away
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
