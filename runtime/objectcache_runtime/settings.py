"""Settings of both processes, from a file, the environment and flags, read once at the start.

Later sources win: defaults, the TOML file, the environment, flags. A key that no setting has is an
error; an environment variable of no section is only warned of. `limits` is what both sides must
agree on; the other sections are what each process may tune.
"""

from __future__ import annotations

import argparse
import functools
import logging
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from objectcache_runtime.networking.listening import either
from objectcache_runtime.root_key import ROOT_ACCESS_KEY_VARIABLE, ROOT_SECRET_KEY_VARIABLE
from objectcache_runtime.setting_values import (
    address,
    checked_value,
    declared,
    either_zero_or,
    likely_names,
    numbers,
    one_of,
    text_like,
)
from objectcache_runtime.usable_paths import PATH_USE, FileUse, check_path, used_as
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import (
    CAP_GBPS_MAX,
    CAP_GBPS_MIN,
    GIB,
    KIB,
    MIB,
    NAME_PATTERN,
    NIC_RATE_MAX,
    NIC_RATE_MIN,
    Limits,
    Positive,
)
from objectcache_schemas.policy_names import EVERY_EPOCH, POLICIES, RATES, ROUTE_POLICIES

logger = logging.getLogger(__name__)

ENVIRONMENT_PREFIX = "OBJECTCACHE_"
# Read by the gateway itself and by clients; not settings.
OTHER_VARIABLES = frozenset(
    {
        ROOT_ACCESS_KEY_VARIABLE,
        ROOT_SECRET_KEY_VARIABLE,
        "OBJECTCACHE_CONFIG",
        "OBJECTCACHE_ENDPOINT",
        "OBJECTCACHE_ACCESS_KEY",
        "OBJECTCACHE_SECRET_KEY",
        "OBJECTCACHE_MASTER_KEY",
        "OBJECTCACHE_ADMIN_ENDPOINT",
        "OBJECTCACHE_ADMIN_TOKEN",
        "OBJECTCACHE_NIC",
        "OBJECTCACHE_NIC_BYTES_PER_S",
        "OBJECTCACHE_RELAYS",
        "OBJECTCACHE_ROUTE",
        "OBJECTCACHE_NODE",
        "OBJECTCACHE_FETCHER",
    }
)

# Kubernetes sets such for every service in the namespace, OBJECTCACHE_ADMIN_SERVICE_HOST for one.
_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT)(_|$)|_PORT(_[0-9]+_(TCP|UDP)(_|$)|$)")

SHARED_STORES = ("rados", "s3", "daos", "file")  # schemes of a shared store's URL

Seconds = Annotated[float, msgspec.Meta(gt=0)]
ZeroOrMore = Annotated[int, msgspec.Meta(ge=0)]
Part = Annotated[float, msgspec.Meta(gt=0, le=1)]
KeptDirectory = Annotated[str, used_as(FileUse.KEPT_DIRECTORY)]
ReadFile = Annotated[str, used_as(FileUse.READ_FILE)]
AppendedFile = Annotated[str, used_as(FileUse.APPENDED_FILE)]
Section = dict[str, Any]


class _Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


def _doc(text: str) -> msgspec.Meta:
    return msgspec.Meta(description=text)


LogLevel = Annotated[
    str, one_of("debug", "info", "warning", "error"), _doc("debug, info, warning or error")
]


class ServerSettings(_Settings, frozen=True):
    """Where the two processes find their files and each other."""

    data_dir: Annotated[
        KeptDirectory, _doc("directory of the objects, the index and the credentials")
    ] = ""
    run_dir: Annotated[
        KeptDirectory, _doc("directory of the sockets between processes; default DATA_DIR/run")
    ] = ""
    storage_address: Annotated[
        str,
        address(""),
        _doc("host:port of a storage server on another host; default its socket in RUN_DIR"),
    ] = ""
    tls_certificate: Annotated[
        ReadFile, _doc("PEM file; what this process shows to the other across hosts")
    ] = ""
    tls_key: Annotated[ReadFile, _doc("PEM file of the certificate's private key")] = ""
    tls_ca: Annotated[
        ReadFile, _doc("PEM file of the authorities whose certificates the other process may show")
    ] = ""
    log_format: Annotated[str, one_of("json", "text"), _doc("how a line of the log is written")] = (
        "json"
    )


class GatewaySettings(_Settings, frozen=True):
    """The gateway's own."""

    listen: Annotated[
        str, address(), _doc("host:port to serve HTTP on; port 0 picks a free one")
    ] = "127.0.0.1:9000"
    region: Annotated[str, _doc("the region that buckets are in")] = "us-east-1"
    acls: Annotated[
        bool,
        _doc(
            "honour S3's access control lists, which let other users and anonymous requests in; "
            "when off, lists other than the owner's alone are refused"
        ),
    ] = False
    strict_region: Annotated[bool, _doc("refuse requests that were signed for another region")] = (
        False
    )
    processes: Annotated[
        int, msgspec.Meta(ge=1, le=64), _doc("gateway processes that serve one port")
    ] = 1
    tls_certificate: Annotated[
        ReadFile, _doc("PEM file of the certificate chain; serves HTTPS instead of HTTP")
    ] = ""
    tls_key: Annotated[
        ReadFile, _doc("PEM file of its private key; default the certificate's file")
    ] = ""
    tls_reload_s: Annotated[Seconds, _doc("how often the two files are looked at for a change")] = (
        10.0
    )
    audit_log: Annotated[
        AppendedFile,
        _doc("file of the audit log in S3's server access log format; none by default"),
    ] = ""
    audit_log_bytes_max: Annotated[
        Positive, _doc("size at which the audit log is renamed and begun again")
    ] = 256 * MIB
    audit_log_files_max: Annotated[Positive, _doc("renamed audit logs that are kept")] = 8
    exact_ranges: Annotated[
        str,
        one_of("none", "aws-sdk-cpp", "all"),
        _doc(
            "whose ranges that end past an object are refused instead of cut to it: clients on "
            "AWS's SDK for C++ (NIXL's OBJ plugin takes what is cut for whole), nobody's, or all"
        ),
    ] = "aws-sdk-cpp"
    virtual_host_domains: Annotated[
        tuple[str, ...], _doc("host suffixes below which the first label names a bucket")
    ] = ("localhost",)
    connections_max: Annotated[
        Positive,
        _doc(
            "open client connections; over it the oldest without a good signature ends, then those "
            "of the user with most"
        ),
    ] = 4096
    requests_in_flight_max: Annotated[
        Positive, _doc("requests served at once, shared max-min among users; more get SlowDown")
    ] = 512
    document_bytes_max: Annotated[
        Positive,
        _doc(
            "memory of each process for requests' descriptors, matches and XML over 64 KiB, as it "
            "arrives, shared max-min among users; more get SlowDown"
        ),
    ] = 256 * MIB
    storage_addresses: Annotated[
        tuple[str, ...],
        _doc(
            "storage servers of one store, host:port or the path of a socket, in place of "
            "server.storage_address; those that they tell of are asked, too"
        ),
    ] = ()
    storage_connections_max: Annotated[
        Positive,
        _doc(
            "connections to the storage server, one request each; fewer where the processes "
            "together would have more than storage.connections_max leaves beside sessions"
        ),
    ] = 704
    storage_timeout_s: Annotated[
        Seconds, _doc("longest silence of the storage server before a request fails")
    ] = 60.0
    session_heartbeat_s: Annotated[
        Seconds,
        _doc(
            "time between pings to a client whose memory is registered through the gateway; one "
            "that does not answer within half of it is given up, and one whose access key is not "
            "in force any more"
        ),
    ] = 5.0
    keepalive_timeout_s: Annotated[Seconds, _doc("idle time of a client connection")] = 90.0
    body_stall_timeout_s: Annotated[
        Seconds, _doc("longest time a client may neither send nor take a byte of a body")
    ] = 60.0
    body_rate_bytes_per_s_min: Annotated[
        ZeroOrMore,
        _doc("rate below which a body may arrive for body_stall_timeout_s, no longer; 0 is none"),
    ] = 1 * KIB
    slow_answer_after_s: Annotated[
        Seconds,
        _doc(
            "time after which a copy or completion that still runs is answered with 200, and with "
            "white space until it ends; what it ends with is in the body, as in S3"
        ),
    ] = 5.0
    drain_timeout_s: Annotated[
        Seconds, _doc("after SIGTERM, time for requests in flight to finish")
    ] = 20.0
    clock_skew_s: Annotated[Seconds, _doc("largest difference to a request's date")] = 900.0
    body_handover: Annotated[
        bool, _doc("let the storage server write bodies to the client's socket itself")
    ] = True
    log_level: LogLevel = "info"


class StorageSettings(_Settings, frozen=True):
    """The storage server's own."""

    engine: Annotated[
        str,
        text_like(
            rf"^(local|files|memory|({'|'.join(SHARED_STORES)})://.+)\Z",
            "local, files or memory, or the URL of a store that several servers share: "
            + either([f"{scheme}://" for scheme in SHARED_STORES]),
        ),
        _doc(
            "local, files or memory, or the URL of a store that several servers share: "
            "rados://POOL, s3://BUCKET, daos://POOL/CONTAINER or file:///FOLDER"
        ),
    ] = "local"
    capacity_bytes: Annotated[
        ZeroOrMore,
        _doc(
            "bytes for data files, whole ones; 0 is what the file system has, less "
            "capacity_reserve_bytes. In a shared store: bytes for objects; 0 is what it has itself"
        ),
    ] = 0
    capacity_reserve_bytes: Annotated[
        ZeroOrMore, _doc("space left to others on the file system")
    ] = 1 * GIB
    data_file_bytes: Annotated[
        int,
        msgspec.Meta(ge=4 * MIB, multiple_of=4 * KIB),
        _doc("size of one data file, when a store is made; less in a small one"),
    ] = 1 * GIB
    extent_row_bytes: Annotated[
        int, msgspec.Meta(ge=4 * KIB, le=64 * MIB), _doc("one layer of an extent, about")
    ] = 1 * MIB
    extent_bytes_max: Annotated[
        int,
        msgspec.Meta(ge=1 * MIB),
        _doc("largest extent of several chunks, and run of an object"),
    ] = 64 * MIB
    index_bytes_max: Annotated[
        int, msgspec.Meta(ge=16 * MIB), _doc("size to which the index may grow (its address space)")
    ] = 64 * GIB
    cache_bytes: Annotated[
        ZeroOrMore,
        _doc(
            "space on a device of this server for what it has put into a shared store or read of "
            "it; 0 is no such cache"
        ),
    ] = 0
    cache_dir: Annotated[KeptDirectory, _doc("directory of that cache; default DATA_DIR/cache")] = (
        ""
    )
    when_full: Annotated[str, one_of("evict", "refuse"), _doc("evict chunks, or refuse puts")] = (
        "evict"
    )
    high_watermark: Annotated[Part, _doc("part of the capacity from which chunks are evicted")] = (
        0.95
    )
    low_watermark: Annotated[Part, _doc("part of the capacity down to which they are")] = 0.90
    grace_s: Annotated[
        Seconds,
        _doc(
            "time for which a shared store keeps the bytes of what was deleted, for whoever reads "
            "them; above delivery_timeout_s of every server"
        ),
    ] = 1200.0
    writer_lease_s: Annotated[
        Seconds,
        _doc(
            "silence after which the servers of a shared store take one of them for dead; what it "
            "was storing is given up; no call of the store is waited for longer"
        ),
    ] = 30.0
    page_cache_bytes: Annotated[
        int,
        msgspec.Meta(ge=-1),
        _doc("page cache for extents; -1 is what the memory limits leave, 0 reads all directly"),
    ] = -1
    page_cache_fraction: Annotated[
        Part, _doc("part of what the memory limits leave that is used")
    ] = 0.8
    direct_io: Annotated[
        str,
        one_of("auto", "io_uring", "threads"),
        _doc("how the direct path submits: auto is io_uring where the kernel allows it"),
    ] = "auto"
    direct_depth: Annotated[
        int,
        msgspec.Meta(ge=1, le=1024),
        _doc("requests in flight of one reader on the direct path"),
    ] = 32
    nvme_device: Annotated[
        str, _doc("character device of an NVMe namespace (/dev/ng0n1) that the store owns whole")
    ] = ""
    nvme_block_device: Annotated[
        str,
        text_like(r"^(auto|off|/.+)\Z", "auto, off or the path of a device"),
        _doc(
            "block device of the same namespace (/dev/nvme0n1), through whose page cache extents "
            "are read and written; auto finds it, off reads and writes all directly"
        ),
    ] = "auto"
    overlap: Annotated[
        str,
        one_of("auto", "intra", "cross"),
        _doc("whether readers share the device; auto measures"),
    ] = "auto"
    compaction_bytes_per_s: Annotated[
        ZeroOrMore, _doc("rate at which chunks are moved together; 0 never moves any")
    ] = 64 * MIB
    compaction_idle_s: Annotated[
        float, msgspec.Meta(ge=0), _doc("age from which a chunk may be moved")
    ] = 30.0
    put_buffer_bytes_max: Annotated[
        Positive, _doc("memory in which puts gather whole extents, for all puts")
    ] = 512 * MIB
    reader_threads: Annotated[
        ZeroOrMore, _doc("threads that read chunks; 0 is one a core, 8 at most")
    ] = 0
    fragment_bytes: Annotated[
        int, msgspec.Meta(ge=64 * KIB, le=64 * MIB), _doc("bytes read and sent as one piece")
    ] = 2 * MIB
    target_fragment_bytes_max: Annotated[
        int,
        msgspec.Meta(ge=64 * KIB, le=64 * MIB),
        _doc("bytes read into a target as one piece, where layers are large"),
    ] = 16 * MIB
    delivery_in_flight_bytes_max: Annotated[
        Positive, _doc("bytes read for one delivery and not yet taken by its client")
    ] = 8 * MIB
    server_in_flight_bytes_max: Annotated[
        Positive, _doc("the same, for all deliveries; one that finds no room waits for its turn")
    ] = 256 * MIB
    deliveries_max: Annotated[Positive, _doc("deliveries at once; more wait")] = 256
    layerwise_threshold_bytes: Annotated[
        ZeroOrMore, _doc("payload from which delivery: auto is layerwise")
    ] = 8 * MIB
    connections_max: Annotated[Positive, _doc("connections from gateways")] = 1024
    puts_max: Annotated[Positive, _doc("puts at once; more wait")] = 128
    put_staging_bytes_max: Annotated[
        Positive, _doc("bytes of unfinished puts; more wait, and one may have three quarters")
    ] = 96 * GIB
    buckets_per_user_max: Annotated[
        Positive, _doc("buckets that one user may own; the root user has no such limit")
    ] = 1000
    open_objects_max: Annotated[Positive, _doc("open files kept for the next read")] = 4096
    send_stall_timeout_s: Annotated[
        Seconds,
        _doc(
            "longest time a client may take for one fragment of a body, or to free room in a ring"
        ),
    ] = 60.0
    client_rate_bytes_per_s_min: Annotated[
        ZeroOrMore,
        _doc(
            "rate below which a client that takes a body or sends a put is cut while others wait "
            "for the memory or the slot that it holds; 0 is none"
        ),
    ] = 256 * KIB
    delivery_timeout_s: Annotated[Seconds, _doc("longest life of a delivery into a target")] = 600.0
    listen: Annotated[
        str,
        address(""),
        _doc("host:port for gateways on other hosts, over mutual TLS; none by default"),
    ] = ""
    advertised_address: Annotated[
        str,
        address(""),
        _doc(
            "host:port at which gateways of other hosts reach this server, which others of a "
            "shared store tell them; default storage.listen where it names a host"
        ),
    ] = ""
    lifecycle_interval_s: Annotated[
        Seconds, _doc("time between two searches for objects that a lifecycle rule expires")
    ] = 3600.0
    lifecycle_day_s: Annotated[
        Seconds, _doc("length of a lifecycle rule's day; shorter only for tests")
    ] = 86400.0
    targets_bytes_max: Annotated[
        Positive, _doc("registered memory of one session on the target socket")
    ] = 64 * GIB
    sessions_max: Annotated[
        Positive, _doc("sessions: clients whose memory is registered, on this host or another")
    ] = 256
    session_messages_per_s: Annotated[
        Positive,
        _doc(
            "messages a second that are read of one session, pings through a gateway among them, "
            "after a burst of twice as many; what comes faster waits in the client's socket"
        ),
    ] = 2000
    session_pass_s: Annotated[
        float,
        msgspec.Meta(ge=0),
        _doc(
            "seconds for which a session that was allowed to read all of a bucket gets from it by "
            "itself, unless accounts or buckets change before; 0 has every get go through a gateway"
        ),
    ] = 60.0
    nixl: Annotated[
        str,
        one_of("auto", "trusting", "off"),
        _doc(
            "auto delivers over NIXL to the root user where the package nixl-cu12 is installed; "
            "trusting to every user, because the library trusts a client with this process' memory"
        ),
    ] = "auto"
    nixl_devices: Annotated[
        str,
        _doc(
            "one network device for NIXL, as UCX names it (mlx5_0:1, eth0); the loopback by "
            "default, empty is all, or those of UCX_NET_DEVICES in the environment"
        ),
    ] = "lo"
    nixl_sessions_max: Annotated[
        Positive,
        _doc(
            "sessions over NIXL, each some 5 MiB of memory and a thread; more get SlowDown, as do "
            "those of one user, root apart, past its share"
        ),
    ] = 64
    nixl_ucx: Annotated[
        str,
        text_like(
            r"^([A-Z0-9_]+=[^=,]+(,[A-Z0-9_]+=[^=,]+)*)?\Z",
            "settings of UCX with commas between them, such as TLS=rc,LOG_LEVEL=warn",
        ),
        _doc("more settings of UCX for NIXL, NAME=VALUE,..., such as TLS=rc"),
    ] = ""
    verbs_device: Annotated[
        str, _doc("RDMA device for deliveries over verbs (mlx5_0, rxe0); none by default")
    ] = ""
    fabric_staging_bytes: Annotated[
        int,
        msgspec.Meta(ge=1 * MIB),
        _doc("registered memory from which deliveries are written over a fabric, for all of them"),
    ] = 64 * MIB
    fabric_timeout_s: Annotated[
        Seconds, _doc("longest time one write over a fabric may take; then its client is given up")
    ] = 10.0
    target_socket_mode: Annotated[
        str,
        text_like(r"^[0-7]{3}\Z", "three octal digits, such as 600 or 660"),
        _doc("permission bits of the target socket, octal; 600 is the server's user only"),
    ] = "600"
    start_without_accounts: Annotated[
        bool,
        _doc("start with no users where accounts.json is lost; for one start, as before a restore"),
    ] = False
    drain_timeout_s: Annotated[
        Seconds, _doc("after SIGTERM, time for deliveries and puts to finish")
    ] = 20.0
    log_level: LogLevel = "info"


class AdminSettings(_Settings, frozen=True):
    """The admin API's: metrics, accounts, everything that `objectcache admin` does."""

    listen: Annotated[
        str,
        address("auto", "off"),
        _doc(
            "host:port; auto is loopback, one port above gateway.listen; off is RUN_DIR/admin.sock"
        ),
    ] = "auto"
    status_page: Annotated[
        bool, _doc("serve the status page at /status, behind an admin token")
    ] = False
    audit_log: Annotated[
        AppendedFile, _doc("file of the admin audit log; default DATA_DIR/admin-audit.log")
    ] = ""
    tls_certificate: Annotated[ReadFile, _doc("PEM file; serves HTTPS instead of HTTP")] = ""
    tls_key: Annotated[
        ReadFile, _doc("PEM file of its private key; default the certificate's file")
    ] = ""
    tenants_in_metrics_max: Annotated[
        int,
        msgspec.Meta(ge=0, le=10_000),
        _doc("tenants that metrics name, the first seen; the rest is one, named other"),
    ] = 50
    log_level: LogLevel = "info"


class DispatchServiceSettings(_Settings, frozen=True):
    """The dispatch service's (docs/dual_path.md), which `objectcache dispatch` runs."""

    listen: Annotated[
        str, address(), _doc("host:port to serve HTTP on; port 0 picks a free one")
    ] = "127.0.0.1:9010"
    token_file: Annotated[
        ReadFile,
        _doc("file of the one line that callers show as a bearer token; for its owner alone"),
    ] = ""
    anonymous: Annotated[
        bool, _doc("without a token file, let anybody in who reaches the port")
    ] = False
    topology: Annotated[ReadFile, _doc("TOML file of nodes that are there without registering")] = (
        ""
    )
    route_policy: Annotated[
        str, one_of(*ROUTE_POLICIES), _doc("how a route is chosen: " + ", ".join(ROUTE_POLICIES))
    ] = "least_lateness"
    beta_tokens: Annotated[
        float,
        msgspec.Meta(gt=0, le=1e12),
        _doc("a prefill worker with more tokens gets nothing: what a GPU prefills in 5 s"),
    ] = 100_000.0
    alpha_s: Annotated[
        float, msgspec.Meta(gt=0, le=3600), _doc("a storage NIC that is busy for longer is avoided")
    ] = 3.0
    slack: Annotated[
        float,
        msgspec.Meta(ge=1, le=100),
        _doc("how far over the mean a decode worker's tokens may be before others come first"),
    ] = 1.05
    any_node: Annotated[
        bool, _doc("nodes without either worker of a request may relay it, too")
    ] = True
    decode: Annotated[
        bool, _doc("requests need a decode worker; false for a cluster of prefill alone")
    ] = True
    report_age_s_max: Annotated[
        float,
        msgspec.Meta(ge=0, le=3600),
        _doc("a node whose last report is older does not relay for others; 0 is any age"),
    ] = 1.0
    reservation_lease_s: Annotated[
        float,
        msgspec.Meta(ge=0.1, le=86_400),
        _doc("a reservation that nobody renews for so long is released"),
    ] = 60.0
    node_lease_s: Annotated[
        float,
        msgspec.Meta(ge=0.1, le=3600),
        _doc("a node that neither registers nor reports for so long is lost"),
    ] = 15.0
    reservations_max: Annotated[
        int, msgspec.Meta(ge=1, le=10_000_000), _doc("requests that wait or run at a time")
    ] = 100_000
    nodes_max: Annotated[
        int, msgspec.Meta(ge=1, le=100_000), _doc("nodes that may be registered at a time")
    ] = 4096
    retry_after_s: Annotated[
        float,
        msgspec.Meta(gt=0, le=3600),
        _doc("what a router is told to wait where a request cannot be placed"),
    ] = 1.0
    tls_certificate: Annotated[ReadFile, _doc("PEM file; serves HTTPS instead of HTTP")] = ""
    tls_key: Annotated[
        ReadFile, _doc("PEM file of its private key; default the certificate's file")
    ] = ""
    log_level: LogLevel = "info"


class SchedulerSettings(_Settings, frozen=True):
    """Who gets which bytes when. `objectcache admin schedule` changes the first five of a running
    server, and what it changed is kept in DATA_DIR/schedule.json and wins over these.
    """

    policy: Annotated[
        str,
        one_of(*POLICIES),
        _doc("how layerwise deliveries share the link: " + ", ".join(POLICIES)),
    ] = "stall_dynamic"
    cap_gbps: Annotated[
        float,
        either_zero_or(CAP_GBPS_MIN, CAP_GBPS_MAX),
        _doc("rate of all deliveries together, 10^9 bits a second; 0 is no cap"),
    ] = 0.0
    margin_gbps: Annotated[
        float,
        msgspec.Meta(ge=0, le=CAP_GBPS_MAX),
        _doc("what calibrated_stall_opt adds to the rate at which a delivery would not stall"),
    ] = 5.0
    epoch_s: Annotated[
        float,
        msgspec.Meta(ge=0.001, le=10),
        _doc("time between two divisions of the link by the policies that assign rates"),
    ] = 0.01
    rates: Annotated[
        str,
        one_of(*RATES),
        _doc(
            "how long an assigned rate holds: every_epoch, worked out again for all that still "
            "have something to send; for_life, until the delivery ends, as in the paper"
        ),
    ] = EVERY_EPOCH
    tenant_deliveries_max: Annotated[
        Positive, _doc("deliveries of one tenant at once, its small ones apart; more wait")
    ] = 256
    queue_max: Annotated[
        ZeroOrMore,
        _doc("requests of one tenant that wait for a turn, memory or a put; more get SlowDown"),
    ] = 256
    queue_timeout_s: Annotated[
        Seconds,
        _doc("longest wait of a request for its turn, memory, a put or a rate, before SlowDown"),
    ] = 10.0
    profiles_dir: Annotated[
        str,
        used_as(FileUse.READ_DIRECTORY),
        _doc("directory of compute profiles, MODEL.csv each; default DATA_DIR/profiles"),
    ] = ""
    traces_kept: Annotated[
        int, msgspec.Meta(ge=0, le=100_000), _doc("deliveries whose trace is kept, the latest")
    ] = 256


class RelaySettings(_Settings, frozen=True):
    """The relay's own; what it writes over is in storage.nixl, nixl_devices, nixl_ucx and
    verbs_device.
    """

    listen: Annotated[
        str, address(), _doc("host:port to serve engines on; port 0 picks a free one")
    ] = "127.0.0.1:7400"
    metrics_listen: Annotated[
        str, address("off"), _doc("host:port of GET /metrics, which nobody signs; or off")
    ] = "127.0.0.1:7401"
    tls_certificate: Annotated[ReadFile, _doc("PEM file; serves HTTPS instead of HTTP")] = ""
    tls_key: Annotated[
        ReadFile, _doc("PEM file of its private key; default the certificate's file")
    ] = ""
    connections_max: Annotated[
        Positive,
        _doc("open connections; over it the oldest without the job's signature ends"),
    ] = 1024
    endpoint: Annotated[str, _doc("URL of the gateway that deliveries are asked of")] = ""
    credentials: Annotated[
        ReadFile,
        _doc(
            "AWS shared-credentials file of the job's access key, which engines sign with, too; "
            "default OBJECTCACHE_ACCESS_KEY and OBJECTCACHE_SECRET_KEY"
        ),
    ] = ""
    transport: Annotated[
        str,
        one_of("auto", "shared_memory", "nixl", "verbs", "body"),
        _doc(
            "how deliveries come in: shared_memory, nixl, verbs or body; auto is the first of them "
            "that the storage server grants, and never verbs"
        ),
    ] = "auto"
    verbs_device: Annotated[
        str,
        _doc(
            "RDMA device that deliveries come in over, by verbs; default that over which they "
            "leave, storage.verbs_device"
        ),
    ] = ""
    landing_bytes: Annotated[
        int,
        msgspec.Meta(ge=1 * MIB),
        _doc(
            "memory for deliveries on their way, 1 MiB at least; the largest of them has to fit, "
            "or two of its layers at a fetcher"
        ),
    ] = 1 * GIB
    in_flight_bytes_max: Annotated[
        Positive,
        _doc(
            "bytes that are being written to one engine at a time, and at a fetcher decoded for "
            "all whose memory is not shared; one piece always may"
        ),
    ] = 64 * MIB
    wait_s: Annotated[
        Seconds, _doc("longest wait of a get for landing memory, before SlowDown")
    ] = 0.05
    hold_s: Annotated[
        float,
        msgspec.Meta(ge=0, le=60),
        _doc(
            "how long what has landed is kept for others that ask for the same, while nobody needs "
            "the memory; 0 shares only what is still being sent"
        ),
    ] = 2.0
    fabric_timeout_s: Annotated[
        Seconds, _doc("longest wait for an engine to take a piece, before its session ends")
    ] = 10.0
    nic: Annotated[
        str,
        text_like(rf"^\Z|{NAME_PATTERN}", "empty, or 1 to 128 letters, digits and any of _.:@=+~-"),
        _doc("name of this node's storage NIC, by which storage servers pace it; empty is none"),
    ] = ""
    nic_bytes_per_s: Annotated[
        float,
        either_zero_or(NIC_RATE_MIN, NIC_RATE_MAX, "bytes per second"),
        _doc("what that NIC carries; 0 is not known, and leaves it unpaced"),
    ] = 0.0
    ip_dscp: Annotated[
        int, msgspec.Meta(ge=0, le=63), _doc("DSCP of what is sent over TCP in bodies; 0 is none")
    ] = 0
    ib_traffic_class: Annotated[
        int,
        msgspec.Meta(ge=0, le=255),
        _doc(
            "traffic class of NIXL and verbs towards engines, DSCP x 4 on RoCE; 0 leaves it to them"
        ),
    ] = 0
    ib_service_level: Annotated[
        int,
        msgspec.Meta(ge=0, le=15),
        _doc("service level of NIXL and verbs towards engines; 0 leaves it to them"),
    ] = 0
    drain_timeout_s: Annotated[Seconds, _doc("after SIGTERM, time for deliveries to finish")] = 20.0
    dispatch: Annotated[
        str,
        _doc(
            "URL of the dispatch service that hears of this relay, or of its replicas, with commas "
            "between them; default nobody does"
        ),
    ] = ""
    dispatch_token_file: Annotated[ReadFile, _doc("file of the dispatch service's token")] = ""
    node: Annotated[
        str, _doc("this node's name, to servers and at the dispatch service; default the host's")
    ] = ""
    url: Annotated[
        str,
        _doc("URL under which engines reach this relay, for the dispatch service; default listen"),
    ] = ""
    storage_nic_gbps: Annotated[
        float,
        msgspec.Meta(ge=0, le=CAP_GBPS_MAX),
        _doc("rate of the storage NIC, 10^9 bits a second, for the dispatch service"),
    ] = 0.0
    compute_nic_gbps: Annotated[
        float,
        msgspec.Meta(ge=0, le=CAP_GBPS_MAX),
        _doc("rate of one compute NIC, 10^9 bits a second, for the dispatch service"),
    ] = 0.0
    compute_nics: Annotated[
        int, msgspec.Meta(ge=1, le=1024), _doc("compute NICs of the node, for the dispatch service")
    ] = 1
    report_s: Annotated[
        float,
        msgspec.Meta(ge=0.05, le=10),
        _doc("time between two reports of the load to the dispatch service"),
    ] = 0.2
    log_level: LogLevel = "info"


class FetcherSettings(_Settings, frozen=True):
    """The fetcher's own; it takes relay.endpoint, credentials, landing memory and such, too."""

    listen: Annotated[
        str, address(), _doc("host:port to serve engines of this host on; port 0 picks a free one")
    ] = "127.0.0.1:7410"
    metrics_listen: Annotated[
        str, address("off"), _doc("host:port of GET /metrics, which nobody signs; or off")
    ] = "127.0.0.1:7411"
    workers: Annotated[
        int, msgspec.Meta(ge=1, le=256), _doc("processes that decode, one processor each")
    ] = 2
    wait_s: Annotated[
        Seconds,
        _doc(
            "longest wait of a get for landing memory, before SlowDown, in the place of "
            "relay.wait_s: a prefix that is larger than the memory holds its part until it has come"
        ),
    ] = 20.0
    cpus: Annotated[
        tuple[str, ...],
        numbers("processors", 4095),
        _doc("numbers of the processors that workers are pinned to, in turn; default any"),
    ] = ()
    encodings: Annotated[
        tuple[str, ...],
        _doc(
            "encodings in which chunks are asked for as they are stored, and decoded here; with "
            "none the storage server decodes; auto: any, where that is sooner"
        ),
    ] = ("planes-zstd", "planes-deflate")
    users: Annotated[
        tuple[str, ...],
        numbers("users", (1 << 32) - 2),
        _doc(
            "numbers of users whose engines may join, beside the fetcher's own; they need "
            "storage.target_socket_mode=666, too"
        ),
    ] = ()
    log_level: LogLevel = "info"


class Settings(_Settings, frozen=True):
    """All settings of a deployment."""

    server: ServerSettings = ServerSettings()
    limits: Limits = Limits()
    gateway: GatewaySettings = GatewaySettings()
    storage: StorageSettings = StorageSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    admin: AdminSettings = AdminSettings()
    relay: RelaySettings = RelaySettings()
    fetcher: FetcherSettings = FetcherSettings()
    dispatch: DispatchServiceSettings = DispatchServiceSettings()

    @property
    def data_dir(self) -> Path:
        """The data directory; raises `InvalidRequest` where none was given."""
        if not self.server.data_dir:
            raise InvalidRequest("server.data_dir is not set; give --data-dir DIR")
        return Path(self.server.data_dir).absolute()

    @property
    def run_dir(self) -> Path:
        """The directory of the processes' sockets."""
        return (
            Path(self.server.run_dir).absolute() if self.server.run_dir else self.data_dir / "run"
        )

    @property
    def cache_dir(self) -> Path:
        """The directory of the cache of a shared store."""
        given = self.storage.cache_dir
        return Path(given).absolute() if given else self.data_dir / "cache"

    @property
    def schedule_file(self) -> Path:
        """Where what an operator changed of the schedule is kept."""
        return self.data_dir / "schedule.json"

    @property
    def profiles_dir(self) -> Path:
        """The directory of compute profiles."""
        given = self.scheduler.profiles_dir
        return Path(given).absolute() if given else self.data_dir / "profiles"

    @property
    def admin_socket(self) -> Path:
        """Where the admin API takes requests of this host's operators."""
        return self.run_dir / "admin.sock"

    def gateway_socket(self, number: int) -> Path:
        """Where gateway process `number` answers the admin API."""
        return self.run_dir / f"gateway-{number}.sock"

    @property
    def storage_socket(self) -> Path:
        """Where the storage server takes gateways' requests."""
        return self.run_dir / "storage.sock"

    @property
    def target_socket(self) -> Path:
        """Where the storage server takes clients' targets."""
        return self.run_dir / "targets.sock"

    @property
    def relay_socket(self) -> Path | None:
        """Where a relay takes targets of engines on its host; None where it has no directory."""
        if not (self.server.run_dir or self.server.data_dir):
            return None
        return self.run_dir / "relay-targets.sock"

    @property
    def fetcher_socket(self) -> Path:
        """Where a fetcher takes targets of engines. Raises `InvalidRequest` without a directory."""
        if not (self.server.run_dir or self.server.data_dir):
            raise InvalidRequest(
                "server.run_dir is not set; give a directory for the socket that engines join at"
            )
        return self.run_dir / "fetcher-targets.sock"


SECTIONS = tuple(field.name for field in msgspec.structs.fields(Settings))


def load_settings(
    file: Path | None, environment: Mapping[str, str], assignments: Sequence[str] = ()
) -> Settings:
    """Settings from a TOML file, OBJECTCACHE_SECTION_KEY variables and `section.key=value` flags.

    Raises `InvalidRequest` naming the setting, the source, and what is allowed, for anything
    unknown or out of bounds.
    """
    sections: dict[str, Section] = {}
    if file is not None:
        _read_file(sections, file)
    _read_environment(sections, environment)
    _read_assignments(sections, assignments)
    return msgspec.convert(sections, Settings)


def _read_file(sections: dict[str, Section], file: Path) -> None:
    try:
        values = tomllib.loads(file.read_text("utf-8"))
    except OSError as error:
        raise InvalidRequest(f"settings file {file}: {error.strerror}") from error
    except ValueError as error:
        raise InvalidRequest(f"settings file {file}: {error}") from error
    for name, section in values.items():
        if name not in SECTIONS or not isinstance(section, dict):
            known = ", ".join(f"[{known}]" for known in SECTIONS)
            raise InvalidRequest(f"settings file {file}: {name!r} is not one of {known}")
        for key, value in section.items():
            _assign(sections, name, key, value, f"in settings file {file}")


def _read_environment(sections: dict[str, Section], environment: Mapping[str, str]) -> None:
    for variable, text in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in OTHER_VARIABLES:
            continue
        section, _, key = variable.removeprefix(ENVIRONMENT_PREFIX).lower().partition("_")
        if section not in SECTIONS or _SERVICE_LINK.search(variable):
            logger.warning("environment variable %s sets nothing and is ignored", variable)
            continue
        _assign_text(sections, section, key, text, f"in environment variable {variable}")


def _read_assignments(sections: dict[str, Section], assignments: Sequence[str]) -> None:
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        section, _, key = name.partition(".")
        if not equals:
            raise InvalidRequest(f"--set {assignment}: write section.key=value")
        _assign_text(sections, section, key, text, "in a flag")


def _assign_text(
    sections: dict[str, Section], section: str, key: str, text: str, source: str
) -> None:
    field = _field(section, key, source)
    value = [part for part in text.split(",") if part] if isinstance(field.default, tuple) else text
    _assign(sections, section, key, value, source)


def _assign(
    sections: dict[str, Section], section: str, key: str, value: object, source: str
) -> None:
    field = _field(section, key, source)
    name = f"{section}.{key}"
    sections.setdefault(section, {})[key] = checked_value(name, field.type, value, source)


def _field(section: str, key: str, source: str) -> msgspec.structs.FieldInfo:
    if section in SECTIONS:
        for field in setting_fields(section):
            if field.name == key:
                return field
    name = f"{section}.{key}" if key else section
    likely = likely_names(name, [known for known, _ in each_setting()])
    raise InvalidRequest(
        f"no setting is called {name}, {source}{likely or '; `objectcache settings` prints all'}"
    )


def check_paths(settings: Settings, *sections: str) -> None:
    """Raises `InvalidRequest` where a path that one of these sections names cannot be used."""
    for name, field in each_setting():
        section = name.partition(".")[0]
        text: object = getattr(getattr(settings, section), field.name)
        use = declared(field.type, PATH_USE)
        if section in sections and isinstance(use, FileUse) and isinstance(text, str) and text:
            check_path(name, text, use)


def each_setting() -> Iterator[tuple[str, msgspec.structs.FieldInfo]]:
    """Every setting with its name, SECTION.KEY."""
    for section in SECTIONS:
        for field in setting_fields(section):
            yield f"{section}.{field.name}", field


@functools.cache  # a start asks dozens of times, and each time every annotation would be evaluated
def setting_fields(section: str) -> tuple[msgspec.structs.FieldInfo, ...]:
    """The settings of one section, for the documentation and the command line."""
    struct = type(getattr(Settings(), section))
    return msgspec.structs.fields(struct)


def parse_command_line(
    program: str,
    description: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    add_more: Callable[[argparse.ArgumentParser], None] | None = None,
) -> tuple[Settings, argparse.Namespace]:
    """Settings of one process from its command line, the file that names, and the environment.

    Raises `InvalidRequest` as `load_settings` does; exits as argparse does on wrong flags. The
    namespace holds `exit_with_stdin`, and what `add_more` added.
    """
    parser = argparse.ArgumentParser(program, description=description)
    add_settings_arguments(parser)
    parser.add_argument(
        "--exit-with-stdin",
        action="store_true",
        help="drain and stop when standard input ends (for a supervisor)",
    )
    if add_more is not None:
        add_more(parser)
    namespace = parser.parse_args(arguments)
    return settings_from_arguments(namespace, environment), namespace


def add_settings_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --config, --data-dir and --set."""
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings")
    parser.add_argument("--data-dir", metavar="DIR", help="short for --set server.data_dir=DIR")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="any setting of docs/settings.md; may be repeated",
    )


def settings_from_arguments(
    namespace: argparse.Namespace, environment: Mapping[str, str]
) -> Settings:
    """Settings from what `add_settings_arguments` parsed."""
    file = namespace.config or environment.get("OBJECTCACHE_CONFIG")
    assignments: list[str] = list(namespace.set)
    if namespace.data_dir:
        assignments.insert(0, f"server.data_dir={namespace.data_dir}")
    return load_settings(Path(file) if file else None, environment, assignments)
