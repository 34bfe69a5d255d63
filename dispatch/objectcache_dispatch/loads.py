"""What workers and nodes report about themselves (section 6.1), and when they measured it."""

from __future__ import annotations

from dataclasses import dataclass

from objectcache_dispatch.checks import check_at_least, check_name, check_positive


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """Requests on a worker that are not finished (seq), and their tokens (tok).

    Of a decode worker, `tok` counts generated tokens too: it is what its GPU's memory holds.
    """

    worker: str
    seq: int = 0
    tok: int = 0
    reported_s: float = 0.0

    def __post_init__(self) -> None:
        check_name("worker of a load", self.worker)
        check_at_least(f"seq of worker {self.worker}", self.seq, 0)
        check_at_least(f"tok of worker {self.worker}", self.tok, 0)
        check_at_least(f"reported_s of worker {self.worker}", self.reported_s, 0)


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """Bytes that a node has been asked to read and has not read yet, and the landing memory in use.

    The paper's read_q counts tokens; bytes hold for models of any size side by side.
    `rate_bytes_per_s` is what the storage NIC gave while it was busy; None where that is not
    known.
    """

    node: str
    read_queue_bytes: int = 0
    landing_bytes_used: int = 0
    is_alive: bool = True
    reported_s: float = 0.0
    rate_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        check_name("node of a load", self.node)
        check_at_least(f"read_queue_bytes of node {self.node}", self.read_queue_bytes, 0)
        check_at_least(f"landing_bytes_used of node {self.node}", self.landing_bytes_used, 0)
        check_at_least(f"reported_s of node {self.node}", self.reported_s, 0)
        if self.rate_bytes_per_s is not None:
            check_positive(f"rate_bytes_per_s of node {self.node}", self.rate_bytes_per_s)
