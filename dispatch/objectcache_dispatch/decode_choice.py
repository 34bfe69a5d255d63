"""Which decode worker takes a request, in two phases (section 6.1).

Phase 1 spreads requests over groups by their tokens; phase 2 spreads a group's over its workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from objectcache_dispatch.loads import WorkerLoad
from objectcache_dispatch.prefill_choice import Assignment, Floats
from objectcache_dispatch.requests import DispatchRequest
from objectcache_dispatch.topology import ClusterWorker
from objectcache_schemas.errors import InvalidRequest

SLACK = 1.05  # of the mean, in Z


def to_decode_groups(
    queue: Iterable[DispatchRequest],
    groups: Mapping[str, Sequence[ClusterWorker]],
    loads: Mapping[str, WorkerLoad],
) -> dict[str, list[DispatchRequest]]:
    """Phase 1: all requests, each to the group whose workers have the least tok together.

    What is assigned counts at once; of equal groups the first. A group none of whose workers
    could ever hold a request does not get it. Raises `InvalidRequest` where no group could.
    """
    names = list(groups)
    totals = np.array(
        [sum(loads[w.name].tok for w in groups[name] if w.name in loads) for name in names],
        np.float64,
    )
    largest = np.array(
        [max((w.kv_capacity_tokens for w in groups[name]), default=0) for name in names], np.float64
    )
    assigned: dict[str, list[DispatchRequest]] = {name: [] for name in names}
    for request in queue:
        chosen = choose_group(totals, largest, request.tokens)
        if chosen is None:
            most = int(largest.max(initial=0))
            raise InvalidRequest(
                f"request {request.name} has {request.tokens} tokens; the largest decode worker "
                f"holds {most}"
            )
        totals[chosen] += request.tokens
        assigned[names[chosen]].append(request)
    return assigned


def choose_group(totals: Floats, largest: Floats, tokens: int) -> int | None:
    """The index of the group with the least total of those that can hold a request of so many
    tokens; `totals` and `largest` are float64[groups].
    """
    able = np.where(largest >= tokens, totals, np.inf)
    if not len(able):
        return None
    best = int(able.argmin())
    return best if able[best] < np.inf else None


def assign_decode(
    private_queue: Iterable[DispatchRequest],
    workers: Sequence[ClusterWorker],
    loads: Mapping[str, WorkerLoad],
    slack: float = SLACK,
) -> list[Assignment]:
    """Phase 2: requests from the head of a group's queue, until one fits on no worker."""
    queue = list(private_queue)
    if not workers:
        return []
    idle = WorkerLoad("none")
    tok = np.array([loads.get(worker.name, idle).tok for worker in workers], np.float64)
    seq = np.array([loads.get(worker.name, idle).seq for worker in workers], np.float64)
    free = np.array([worker.kv_capacity_tokens for worker in workers], np.float64) - tok
    limit = high_token_limit((request.tokens for request in queue), tok, free, slack)
    assigned = list[Assignment]()
    for request in queue:
        chosen = choose_decode(request.tokens, tok, seq, free, limit)
        if chosen is None:
            break
        tok[chosen] += request.tokens
        seq[chosen] += 1
        free[chosen] -= request.tokens
        assigned.append(Assignment(request, workers[chosen].name))
    return assigned


def high_token_limit(
    lengths: Iterable[int], tok: Floats, free: Floats, slack: float = SLACK
) -> float:
    """Z = slack x (sum of len over R + sum of tok) / workers.

    R is as many from the queue's head as would fit if the free memory of all workers were one.
    `tok` and `free` are float64[workers], of workers that are alive.
    """
    room = float(np.maximum(free, 0).sum())
    of_r = 0
    for length in lengths:
        if of_r + length > room:
            break
        of_r += length
    return slack * (of_r + float(tok.sum())) / len(tok)


def choose_decode(tokens: int, tok: Floats, seq: Floats, free: Floats, limit: float) -> int | None:
    """Phase 2 for one request; the index of a worker, or None where it fits nowhere.

    Of the workers with room for it, those that it would not bring over `limit` (Z) come first, by
    least seq; else the one with the least tok. Of equal ones the first.
    """
    fits = free >= tokens
    balanced = fits & (tok + tokens <= limit)
    by_seq = np.where(balanced, seq, np.inf)
    best = int(by_seq.argmin())
    if by_seq[best] < np.inf:
        return best
    by_tok = np.where(fits, tok, np.inf)
    best = int(by_tok.argmin())
    return best if by_tok[best] < np.inf else None
