"""The dispatch service's bodies, as JSON: what routers, workers and relays say to it.

Ages, not times, cross the wire: clocks of hosts need not agree. Every text and number is bounded
here, so that what is kept of a request is, too.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from objectcache_schemas.limits import NAME_PATTERN, NAME_WORDS
from objectcache_schemas.operators.admin_api import Body

WORKERS_PER_NODE_MAX = 256
LOADS_PER_REPORT_MAX = 8192
FETCHED_GROUPS_MAX = 64
LEASE_S_MAX = 3600.0
AGE_S_MAX = 3600.0

# An origin: what a client is given as its relay.
RELAY_URL_PATTERN = r"^https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(:[0-9]{1,5})?\Z"
RELAY_URL_WORDS = "http://HOST:PORT or https://HOST:PORT"
# What a text has to be, for whom an error would otherwise show a pattern.
DISPATCH_PATTERN_WORDS = {NAME_PATTERN: NAME_WORDS, RELAY_URL_PATTERN: RELAY_URL_WORDS}

RelayUrl = Annotated[str, msgspec.Meta(pattern=RELAY_URL_PATTERN, max_length=300)]
DispatchName = Annotated[str, msgspec.Meta(pattern=NAME_PATTERN)]
ByteCount = Annotated[int, msgspec.Meta(ge=0, le=1 << 52)]
TokenCount = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Rate = Annotated[float, msgspec.Meta(gt=0, le=1e15)]
RateOrNone = Annotated[float, msgspec.Meta(ge=0, le=1e15)]  # 0 is none
Age = Annotated[float, msgspec.Meta(ge=0, le=AGE_S_MAX)]
Lease = Annotated[float, msgspec.Meta(gt=0, le=LEASE_S_MAX)]


# --- nodes ----------------------------------------------------------------------------------------


class RegisteredWorker(Body, frozen=True):
    """As `objectcache_dispatch.ClusterWorker`."""

    name: DispatchName
    role: Literal["prefill", "decode"]
    group: DispatchName
    kv_capacity_tokens: TokenCount = 0


class NodeRegistration(Body, frozen=True):
    """A whole node, as `objectcache_dispatch.Node`, but for what its relay registers; without its
    next registration or report it is lost after `lease_s` (default: dispatch.node_lease_s).
    """

    storage_nic_bytes_per_s: RateOrNone
    compute_nic_bytes_per_s: Rate
    compute_nics: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    memory_bytes_per_s: RateOrNone = 0.0
    landing_bytes: ByteCount = 0
    workers: Annotated[
        tuple[RegisteredWorker, ...], msgspec.Meta(max_length=WORKERS_PER_NODE_MAX)
    ] = ()
    lease_s: Lease | None = None


class RelayRegistration(Body, frozen=True):
    """A node's relay, which has the same rates as the node, its own landing memory, and the URL
    under which clients reach it.
    """

    relay: RelayUrl
    storage_nic_bytes_per_s: Rate
    compute_nic_bytes_per_s: Rate
    landing_bytes: ByteCount
    compute_nics: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    memory_bytes_per_s: RateOrNone = 0.0
    lease_s: Lease | None = None


class NodeRegistered(Body, frozen=True):
    """`is_new`: it was not known, so its load is not, either, until it reports."""

    name: str
    is_new: bool
    lease_s: float


# --- requests -------------------------------------------------------------------------------------


class SelectRequest(Body, frozen=True):
    """As `objectcache_dispatch.DispatchRequest`; `name` is what its reservation is called."""

    name: DispatchName
    cached_tokens: TokenCount
    new_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    layer_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
    num_layers: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    compute_window_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] | None = None
    chunk_bytes: ByteCount = 0
    tenant: Annotated[str, msgspec.Meta(max_length=256)] = ""


class RouteRequest(SelectRequest, frozen=True, kw_only=True):
    """The same with the workers that a router has picked."""

    prefill: DispatchName
    decode: DispatchName | None = None


class ReservedPart(Body, frozen=True):
    """What one node reads; `relay` is null for the prefill worker's own, and `relay_url` where its
    relay has registered none.
    """

    node: str
    relay: str | None
    read_bytes: int
    chunk_count: int
    relay_url: str | None = None


class RequestReservation(Body, frozen=True):
    """What holds for a request now. While it waits, the workers and the route are null."""

    name: str
    lease_s: float
    prefill: str | None = None
    prefill_node: str | None = None
    decode: str | None = None
    decode_node: str | None = None
    route: str | None = None  # direct, relay:NODE or split:..
    parts: tuple[ReservedPart, ...] = ()
    predicted_lateness_s: float = 0.0


class Undone(Body, frozen=True):
    """What a node's loss undid: `lost` are to be selected again, `rerouted` have another route."""

    lost: tuple[str, ...] = ()
    rerouted: tuple[RequestReservation, ...] = ()


# --- loads ----------------------------------------------------------------------------------------


class ReportedWorker(Body, frozen=True):
    """Requests on a worker that are not finished, and their tokens, `age_s` ago."""

    worker: DispatchName
    seq: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)] = 0
    tok: TokenCount = 0
    age_s: Age = 0.0


class ReportedNode(Body, frozen=True):
    """Bytes that a node has yet to read, and landing memory in use, `age_s` ago. `relay` is the URL
    of the relay that says so: of another one than is registered, the report does not count.
    """

    node: DispatchName
    read_queue_bytes: ByteCount = 0
    landing_bytes_used: ByteCount = 0
    is_alive: bool = True
    age_s: Age = 0.0
    rate_bytes_per_s: Rate | None = None
    relay: RelayUrl | None = None


class LoadsReport(Body, frozen=True):
    """Any workers' and nodes' loads; `fetch` names groups that take their work with it."""

    workers: Annotated[
        tuple[ReportedWorker, ...], msgspec.Meta(max_length=LOADS_PER_REPORT_MAX)
    ] = ()
    nodes: Annotated[tuple[ReportedNode, ...], msgspec.Meta(max_length=LOADS_PER_REPORT_MAX)] = ()
    fetch: Annotated[tuple[DispatchName, ...], msgspec.Meta(max_length=FETCHED_GROUPS_MAX)] = ()


class LoadsTaken(Body, frozen=True):
    """`unknown` are workers, nodes and groups that no registered node has: their loads were left
    out, and they register anew, as after a restart of the service.
    """

    unknown: tuple[str, ...] = ()
    fetched: tuple[RequestReservation, ...] = ()
    undone: Undone = Undone()


# --- state ----------------------------------------------------------------------------------------


class WorkerState(Body, frozen=True):
    """A worker with its load as it is counted now."""

    name: str
    role: str
    group: str
    kv_capacity_tokens: int
    seq: int
    tok: int


class NodeState(Body, frozen=True):
    """A node with its load as it is counted now. Without a lease it is of the topology file.
    `relay` is its relay's URL.
    """

    name: str
    is_alive: bool
    lease_left_s: float | None
    storage_nic_bytes_per_s: float
    compute_nic_bytes_per_s: float
    compute_nics: int
    memory_bytes_per_s: float
    landing_bytes: int
    read_queue_bytes: int
    landing_bytes_used: int
    workers: tuple[WorkerState, ...]
    relay: str | None = None


class DispatchState(Body, frozen=True):
    """All that the service knows but for single reservations."""

    nodes: tuple[NodeState, ...]
    reservations: int
    waiting: int
    policy: str


# --- relays ---------------------------------------------------------------------------------------


class ListedRelay(Body, frozen=True):
    """A node whose relay has registered and takes part, and where clients reach it."""

    name: str
    relay: str


class ListedRelays(Body, frozen=True):
    """Answer to `GET /v1/relays`, by name: the same bytes for as long as the same relays are there.
    Loads are not among it, which change all the time: relays report their own.
    """

    relays: tuple[ListedRelay, ...]
