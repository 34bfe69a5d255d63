"""The admin API's bodies and queries, as JSON: what `objectcache admin` and the admin server share.

A change (PATCH) says only what it changes: a field that is absent stays, null is none. Every change
of a user, key, token or bucket is in force everywhere within milliseconds.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType

from objectcache_schemas.accounts import (
    ACCESS_KEY_PATTERN,
    GRANTS_PER_USER_MAX,
    SECRET_KEY_PATTERN,
    USER_NAME_PATTERN,
    Access,
    Grant,
    check_name,
    check_user_name,
)
from objectcache_schemas.layout import KvLayout
from objectcache_schemas.messages.quotas import TenantActivity
from objectcache_schemas.operators.engine_status import CheckReport
from objectcache_schemas.operators.schedule import (
    ScheduleChanges,
    ScheduleConfiguration,
    ScheduledDelivery,
    ScheduledNic,
)
from objectcache_schemas.operators.traces import DeliveryTrace
from objectcache_schemas.records import (
    BucketConfiguration,
    BucketInfo,
    BucketPolicy,
    Durability,
    EtagMode,
    Freshness,
    LifecycleRule,
    Quota,
    StoredEncoding,
    Verification,
)

PAGE_ITEMS_MAX = 1000
NOTE_CHARS_MAX = 256
LIFETIME_S_MAX = 10 * 366 * 86_400.0
PIN_KEYS_MAX = 10_000
AMOUNT_MAX = 1 << 60  # bytes or objects; far above any store
BACKUP_VERSION = 1
PASSPHRASE_CHARS_MIN = 8
CHECKPOINT_TIMEOUT_S = 900.0  # for an index of many gigabytes

RESOURCES = (
    *("users", "keys", "tokens", "buckets", "usage", "engine", "schedule", "traces"),
    *("metrics", "server", "status"),
)
READ_ONLY = ("usage", "traces", "metrics", "status")
READ, WRITE = "read", "write"
SIGNING_SERVICE = "objectcache-admin"  # in a signature's scope, where S3's says s3
SCOPE_ADMIN = "admin"  # everything, backup and restore too
SCOPE_READ = "read"  # whatever only reads
SCOPES = (
    SCOPE_ADMIN,
    SCOPE_READ,
    *(f"{resource}:{READ}" for resource in RESOURCES),
    *(f"{resource}:{WRITE}" for resource in RESOURCES if resource not in READ_ONLY),
)

# Refused in words where something is made: a decoder would say the pattern.
NewName = Annotated[str, msgspec.Meta(extra_json_schema={"pattern": USER_NAME_PATTERN})]
Name = Annotated[str, msgspec.Meta(pattern=USER_NAME_PATTERN)]
Note = Annotated[str, msgspec.Meta(max_length=NOTE_CHARS_MAX)]
Lifetime = Annotated[float, msgspec.Meta(gt=0, le=LIFETIME_S_MAX)]
BucketName = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
PROCESS_PATTERN = r"^(all|admin|storage|gateway-[0-9]{1,2})\Z"
# What a text has to be, for whom an error would otherwise show a pattern.
PATTERN_WORDS = {
    USER_NAME_PATTERN: "1 to 64 letters, digits and any of _+=,.@-",
    ACCESS_KEY_PATTERN: "3 to 128 letters, digits and any of _+=,.@-",
    SECRET_KEY_PATTERN: "8 to 1,024 printable ASCII characters without spaces",
    PROCESS_PATTERN: "all, admin, storage or gateway-NUMBER",
}

Passphrase = Annotated[str, msgspec.Meta(min_length=PASSPHRASE_CHARS_MIN, max_length=1024)]
Grants = Annotated[tuple[Grant, ...], msgspec.Meta(max_length=GRANTS_PER_USER_MAX)]


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all bodies and queries."""


class Page(Body, frozen=True):
    """Which part of a list: at most `limit` items whose names follow `after`."""

    after: str = ""
    limit: Annotated[int, msgspec.Meta(ge=1, le=PAGE_ITEMS_MAX)] = 100


class Problem(Body, frozen=True, omit_defaults=True):
    """Why a request was refused. `code` is a row of docs/errors.md."""

    code: str
    message: str
    retry_after_s: float | None = None


# --- users ----------------------------------------------------------------------------------------


class UserView(Body, frozen=True):
    """A user."""

    name: str
    created_s: float
    enabled: bool
    may_create_buckets: bool
    grants: tuple[Grant, ...]
    quota: Quota
    key_count: int


class UserList(Body, frozen=True):
    """Users by name; `next_after` continues, null is the end."""

    users: tuple[UserView, ...]
    next_after: str | None = None


class NewUser(Body, frozen=True):
    """A user to make, with one key pair unless `with_key` is false.

    What is not given of the pair is made up, and said in the reply.
    """

    name: NewName
    may_create_buckets: bool = True
    grants: Grants = ()
    quota: Quota = Quota()
    with_key: bool = True
    access_key: Annotated[str, msgspec.Meta(pattern=ACCESS_KEY_PATTERN)] | None = None
    secret_key: Annotated[str, msgspec.Meta(pattern=SECRET_KEY_PATTERN)] | None = None

    def __post_init__(self) -> None:
        check_user_name(self.name)
        if not self.with_key and (self.access_key or self.secret_key):
            raise ValueError("`with_key` is false, so access_key and secret_key must be absent")


class UserChange(Body, frozen=True):
    """What to change of a user."""

    enabled: bool | UnsetType = UNSET
    may_create_buckets: bool | UnsetType = UNSET


class QuotaChange(Body, frozen=True):
    """What to change of a quota; null is no limit."""

    stored_bytes: Annotated[int, msgspec.Meta(ge=0, le=AMOUNT_MAX)] | UnsetType | None = UNSET
    object_count: Annotated[int, msgspec.Meta(ge=0, le=AMOUNT_MAX)] | UnsetType | None = UNSET
    requests_per_s: Annotated[float, msgspec.Meta(gt=0, le=1000000000.0)] | UnsetType | None = UNSET
    in_flight_bytes: Annotated[int, msgspec.Meta(ge=1, le=AMOUNT_MAX)] | UnsetType | None = UNSET
    deliveries: Annotated[int, msgspec.Meta(ge=1, le=AMOUNT_MAX)] | UnsetType | None = UNSET


class GrantList(Body, frozen=True):
    """A user's grants."""

    grants: tuple[Grant, ...]


class NewGrant(Body, frozen=True):
    """Access to give: to a bucket ("*" is every one), or to the keys in it with a prefix."""

    bucket: BucketName
    access: Annotated[tuple[Access, ...], msgspec.Meta(min_length=1, max_length=len(Access))]
    prefix: Annotated[str, msgspec.Meta(max_length=1024)] = ""


class GrantChoice(Body, frozen=True):
    """Which grants to remove: of the bucket and prefix, all accesses or one."""

    bucket: BucketName
    prefix: str = ""
    access: Access | None = None


# --- keys -----------------------------------------------------------------------------------------


class KeyChoice(Page, frozen=True):
    """Which keys to list."""

    user: str = ""


class KeyView(Body, frozen=True):
    """An access key, without its secret."""

    access_key: str
    user: str
    created_s: float
    expires_s: float | None
    enabled: bool
    scope: tuple[Grant, ...]
    note: str


class KeyList(Body, frozen=True):
    """Keys by access key."""

    keys: tuple[KeyView, ...]
    next_after: str | None = None


class NewKey(Body, frozen=True):
    """A key pair to make for a user; what is not given of the pair is made up."""

    user: Name
    access_key: Annotated[str, msgspec.Meta(pattern=ACCESS_KEY_PATTERN)] | None = None
    secret_key: Annotated[str, msgspec.Meta(pattern=SECRET_KEY_PATTERN)] | None = None
    lifetime_s: Lifetime | None = None
    scope: Grants = ()
    note: Note = ""


class NewKeyPair(Body, frozen=True):
    """A key pair that was made. The secret is said here and never again."""

    access_key: str
    secret_key: str
    user: str
    expires_s: float | None = None

    def __repr__(self) -> str:
        return f"<NewKeyPair {self.access_key} of {self.user}>"


class NewUserReply(Body, frozen=True):
    """A user that was made, and its key pair."""

    user: UserView
    key: NewKeyPair | None = None


class KeyChange(Body, frozen=True):
    """What to change of a key. `lifetime_s` counts from now; null is no end."""

    enabled: bool | UnsetType = UNSET
    lifetime_s: Lifetime | UnsetType | None = UNSET
    note: Note | UnsetType = UNSET


class Rotation(Body, frozen=True):
    """Make another pair of the same user, scope and note; the old one ends after the overlap.

    The new one ends when the old one would have, or after `lifetime_s` from now; null is no end.
    """

    overlap_s: Annotated[float, msgspec.Meta(ge=0, le=LIFETIME_S_MAX)] = 86_400.0
    lifetime_s: Lifetime | UnsetType | None = UNSET


class RotatedKey(Body, frozen=True):
    """The pair that takes over, and the key that ends."""

    key: NewKeyPair
    old: KeyView


# --- tokens ---------------------------------------------------------------------------------------


class TokenView(Body, frozen=True):
    """A token of the admin API, without what it is."""

    token_id: str
    name: str
    scopes: tuple[str, ...]
    created_s: float
    expires_s: float | None


class TokenList(Body, frozen=True):
    """All tokens by id."""

    tokens: tuple[TokenView, ...]


class NewToken(Body, frozen=True):
    """A token to make, with no more than what the one who asks may do."""

    name: NewName
    scopes: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=len(SCOPES))]
    lifetime_s: Lifetime | None = 30 * 86_400.0

    def __post_init__(self) -> None:
        check_name("a token", self.name)
        unknown = next((scope for scope in self.scopes if scope not in SCOPES), None)
        if unknown is not None:
            raise ValueError(f"{unknown!r} is no scope; known are {', '.join(SCOPES)}")


class NewTokenReply(Body, frozen=True):
    """A token that was made. It is said here and never again."""

    token: str
    view: TokenView

    def __repr__(self) -> str:
        return f"<NewTokenReply {self.view.token_id}>"


# --- buckets --------------------------------------------------------------------------------------


class BucketView(Body, frozen=True):
    """A bucket, and what it holds."""

    name: str
    owner: str
    region: str
    created_s: float
    layout: KvLayout | None
    policy: BucketPolicy
    configuration: BucketConfiguration
    object_count: int
    stored_bytes: int
    encoded_bytes: int = 0  # of the frames of chunks that are stored encoded
    decoded_bytes: int = 0  # of those chunks, among the stored ones


class BucketChoice(Page, frozen=True):
    """Which buckets to list."""

    owner: str = ""


class BucketList(Body, frozen=True):
    """Buckets by name."""

    buckets: tuple[BucketView, ...]
    next_after: str | None = None


class NewBucket(Body, frozen=True):
    """A bucket to make for a user."""

    name: BucketName
    owner: Name = "root"
    layout: KvLayout | None = None
    etag_mode: EtagMode = EtagMode.MD5
    quota: Quota = Quota()


class PolicyChange(Body, frozen=True):
    """What to change of a bucket's policy."""

    durability: Durability | UnsetType = UNSET
    verification: Verification | UnsetType = UNSET
    quota_bytes: Annotated[int, msgspec.Meta(ge=1, le=AMOUNT_MAX)] | UnsetType | None = UNSET
    ttl_s: Annotated[float, msgspec.Meta(gt=0)] | UnsetType | None = UNSET
    reads: Freshness | UnsetType | None = UNSET
    encoding: StoredEncoding | UnsetType | None = UNSET


class ConfigurationChange(Body, frozen=True):
    """What to change of a bucket's configuration, beside its quota."""

    etag_mode: EtagMode | UnsetType = UNSET
    lifecycle: Annotated[tuple[LifecycleRule, ...], msgspec.Meta(max_length=1000)] | UnsetType = (
        UNSET
    )


class Pins(Body, frozen=True):
    """Keep objects from eviction and expiry, or no longer."""

    keys: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=PIN_KEYS_MAX)]
    pinned: bool


class PinsReply(Body, frozen=True):
    """How many of the keys are stored, and so pinned or not."""

    count: int


# --- usage ----------------------------------------------------------------------------------------


class UsageChoice(Body, frozen=True):
    """Whose usage; nothing is everybody's."""

    user: str = ""
    bucket: str = ""


class BucketUsageView(Body, frozen=True):
    """What one bucket holds, and may."""

    bucket: str
    owner: str
    object_count: int
    stored_bytes: int
    quota: Quota


class UserUsage(Body, frozen=True):
    """What one user's buckets hold, what goes on for the user, and what may."""

    user: str
    bucket_count: int
    object_count: int
    stored_bytes: int
    in_flight_bytes: int
    deliveries: int
    quota: Quota


class UsageReply(Body, frozen=True):
    """Usage by user and by bucket; the first 10,000 buckets."""

    users: tuple[UserUsage, ...]
    buckets: tuple[BucketUsageView, ...]


# --- the server -----------------------------------------------------------------------------------


class ScheduleReply(Body, frozen=True):
    """The schedule in force, the deliveries that run by it, and the storage NICs that they go to;
    the first 1,000 of each.
    """

    configuration: ScheduleConfiguration
    changes: ScheduleChanges
    deliveries: tuple[ScheduledDelivery, ...]
    delivery_count: int
    waiting: int
    rate_bytes_per_s: float
    nics: tuple[ScheduledNic, ...] = ()


class ScheduleChange(Body, frozen=True):
    """Changes of the schedule; `reset` forgets all earlier ones first."""

    changes: ScheduleChanges = ScheduleChanges()
    reset: bool = False


class DeliveriesReply(Body, frozen=True):
    """What is delivered now; the first 1,000."""

    at_s: float  # Unix time
    deliveries: tuple[ScheduledDelivery, ...]
    delivery_count: int
    waiting: int
    rate_bytes_per_s: float
    tenants: tuple[TenantActivity, ...]


class TraceChoice(Body, frozen=True):
    """How many traces, the latest."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=PAGE_ITEMS_MAX)] = 20


class TracesReply(Body, frozen=True):
    """What became of deliveries, the latest first."""

    traces: tuple[DeliveryTrace, ...]


class StatusData(Body, frozen=True):
    """What the status page draws; the counters begin at the processes' start."""

    at_unix_s: float
    engine: str
    draining: bool
    stored_bytes: int
    capacity_bytes: int  # 0: none is known
    requests: float
    matched_chunks: float
    missed_chunks: float
    schedule: ScheduleReply
    traces: tuple[DeliveryTrace, ...]


class CheckChoice(Body, frozen=True):
    """Whether a check drops what is bad."""

    repair: bool = False


class CheckLine(Body, frozen=True, omit_defaults=True):
    """One step of a check. The last has `ended`, and a `problem` where it could not be done."""

    report: CheckReport = CheckReport()
    ended: bool = False
    problem: Problem | None = None


class CheckpointView(Body, frozen=True):
    """A checkpoint that was taken."""

    number: int  # of the first record that it lacks
    size_bytes: int
    taken_s: float  # for it


class LogLevel(Body, frozen=True):
    """What to log from now on, of all processes or of one."""

    level: Literal["debug", "info", "warning", "error"]
    process: Annotated[str, msgspec.Meta(pattern=PROCESS_PATTERN)] = "all"


class ProcessState(Body, frozen=True, omit_defaults=True):
    """How one process answered."""

    process: str  # "admin", "storage", "gateway-0"
    ok: bool
    degraded: bool = False  # it serves, and failed some lately; `message` says whom
    message: str = ""  # empty, or why it is not ok, whom it failed, or that it is draining


class ProcessesReply(Body, frozen=True):
    """How the processes answered that were asked."""

    processes: tuple[ProcessState, ...]


class DrainChange(Body, frozen=True, omit_defaults=True):
    """Take no new deliveries and puts, or take them again. `server` names one of several; `last`
    says that none of the others may take work then.
    """

    draining: bool
    server: str = ""
    last: bool = False


class StorageServerView(Body, frozen=True, omit_defaults=True):
    """One storage server, or why it did not answer."""

    server: str  # its name: host:port, or the path of its socket
    ok: bool
    message: str = ""  # why it did not answer, or cannot do all that needs its store
    host_id: str = ""  # boot id of its host
    load: int = 0  # deliveries and puts that run or wait
    in_flight_bytes: int = 0
    sessions: int = 0  # of clients, that are open
    draining: bool = False
    writer: str = ""  # under which it writes to a shared store; empty where the store is its own
    lag_records: int = 0  # of the store's log, that it has not replayed
    lag_is_known: bool = True  # false where it cannot tell what the log ends with


class ServersReply(Body, frozen=True):
    """The storage servers of the store."""

    servers: tuple[StorageServerView, ...]


class HealthReply(Body, frozen=True):
    """The state of the processes. `status` is "ok", "degraded" (a process failed some
    lately, as its `message` says), "draining", "read_only" (a flush has failed) or "unavailable".
    """

    status: Literal["ok", "degraded", "draining", "read_only", "unavailable"]
    processes: tuple[ProcessState, ...]
    engine: str = ""
    draining: bool = False
    deliveries_in_flight: int = 0
    in_flight_bytes: int = 0
    damaged_count: int = 0
    flush_failure: str = ""  # why nothing is stored until a restart; empty while all is well
    audit_lines_lost: int = 0  # of the admin audit log, since its process started


class Liveness(Body, frozen=True):
    """That the admin API serves."""

    status: Literal["ok"] = "ok"


# --- backup ---------------------------------------------------------------------------------------


class BackupRequest(Body, frozen=True):
    """What seals the secrets of a backup."""

    passphrase: Passphrase

    def __repr__(self) -> str:
        return "<BackupRequest>"


class BackupContent(Body, frozen=True):
    """What a backup holds: no object, and no secret that is not sealed."""

    version: int
    created_s: float
    accounts: bytes  # sealed with the passphrase
    buckets: tuple[BucketInfo, ...]
    schedule: ScheduleChanges


class Backup(Body, frozen=True):
    """A backup, and the proof that it is as it was made: HMAC-SHA256 under the passphrase."""

    content: BackupContent
    salt: bytes
    proof: bytes


class RestoreRequest(Body, frozen=True):
    """A backup to restore. `replace` lets it replace accounts and configurations that are there."""

    passphrase: Passphrase
    backup: Backup
    replace: bool = False

    def __repr__(self) -> str:
        return "<RestoreRequest>"


class RestoreReply(Body, frozen=True):
    """What was restored."""

    users: int
    keys: int
    tokens: int
    buckets_created: int
    buckets_configured: int
    # Names of those whose encoding in the backup was left out, because the engine encodes nothing.
    buckets_plain: tuple[str, ...] = ()
