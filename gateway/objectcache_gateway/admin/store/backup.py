"""Backup and restore of what is no object: accounts, buckets, the schedule.

A backup is one document. The storage server seals the accounts; the whole carries a proof under the
same passphrase, so that what was damaged or changed is refused before anything is restored.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets

import msgspec

from objectcache_gateway.admin.serving.accounts_view import KnownAccounts
from objectcache_gateway.admin.serving.routes import Call, Nothing, Route
from objectcache_gateway.admin.store.buckets import all_buckets
from objectcache_gateway.storage.change_bucket import change_configuration
from objectcache_gateway.storage.storage_fleet import StorageFleet
from objectcache_runtime.passphrases import passphrase_key
from objectcache_schemas.accounts import RebindGrants
from objectcache_schemas.errors import AccessDenied, Conflict, InvalidRequest, Unsupported
from objectcache_schemas.messages.buckets import CreateBucket, SetLayout, SetPolicy
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.operators.account_changes import (
    AccountsChanged,
    AccountsExported,
    ExportAccounts,
    ImportAccounts,
)
from objectcache_schemas.operators.admin_api import (
    BACKUP_VERSION,
    SCOPE_ADMIN,
    Backup,
    BackupContent,
    BackupRequest,
    RestoreReply,
    RestoreRequest,
)
from objectcache_schemas.operators.schedule import (
    GetSchedule,
    ScheduleChanges,
    ScheduleState,
    SetSchedule,
)
from objectcache_schemas.records import BucketInfo, BucketPolicy

BACKUP_BYTES_MAX = 64 << 20
SALT_BYTES = 16
PROOF_KEY_BYTES = 64


def proof_of(content: BackupContent, passphrase: str, salt: bytes) -> bytes:
    """HMAC-SHA256 of the content under a key of the passphrase."""
    key = passphrase_key(
        passphrase.encode("utf-8", "surrogateescape"),
        b"objectcache/backup/v1" + salt,
        PROOF_KEY_BYTES,
    )
    return hmac.digest(key, msgspec.msgpack.encode(content, order="deterministic"), "sha256")


async def make_backup(call: Call[BackupRequest, Nothing]) -> Backup:
    """Everything but the objects, as of now."""
    passphrase = call.body.passphrase
    accounts = await call.storage.call(ExportAccounts(passphrase=passphrase), AccountsExported)
    buckets = await all_buckets(call.storage)
    schedule = await call.storage.call(GetSchedule(), ScheduleState)
    content = BackupContent(
        version=BACKUP_VERSION,
        created_s=call.now_s,
        accounts=accounts.data,
        buckets=tuple(buckets[name] for name in sorted(buckets)),
        schedule=schedule.changes,
    )
    salt = secrets.token_bytes(SALT_BYTES)
    proof = await asyncio.to_thread(proof_of, content, passphrase, salt)
    return Backup(content=content, salt=salt, proof=proof)


async def restore(call: Call[RestoreRequest, Nothing]) -> RestoreReply:
    """Bring back what a backup holds. What refuses it refuses it before anything is changed."""
    wanted, backup = call.body, call.body.backup
    content = backup.content
    if content.version != BACKUP_VERSION:
        raise InvalidRequest(f"backup.content.version must be {BACKUP_VERSION}")
    proof = await asyncio.to_thread(proof_of, content, wanted.passphrase, backup.salt)
    if not hmac.compare_digest(proof, backup.proof):
        raise AccessDenied("the passphrase is not that of the backup, or the backup was changed")
    async with call.accounts.changing:
        existing = await all_buckets(call.storage)
        schedule = await call.storage.call(GetSchedule(), ScheduleState)
        check_buckets(existing, content.buckets, wanted.replace)
        if not wanted.replace:
            check_empty(await call.accounts.look(), schedule.changes, content.schedule)
        imported = ImportAccounts(passphrase=wanted.passphrase, data=content.accounts)
        await call.storage.call(imported, AccountsChanged)
        buckets_plain = [
            info.name
            for info in content.buckets
            if not await _restore_bucket(call.storage, info, existing.get(info.name))
        ]
        made = {info.name: info.created_s for info in content.buckets}
        await call.accounts.change(RebindGrants(created_s=made))
        await call.storage.call(SetSchedule(changes=content.schedule, reset=True), ScheduleState)
        accounts = await call.accounts.look()
    created = sum(info.name not in existing for info in content.buckets)
    return RestoreReply(
        users=len(accounts.users),
        keys=len(accounts.keys),
        tokens=len(accounts.tokens),
        buckets_created=created,
        buckets_configured=len(content.buckets) - created,
        buckets_plain=tuple(buckets_plain),
    )


def check_empty(accounts: KnownAccounts, now: ScheduleChanges, restored: ScheduleChanges) -> None:
    """Raise `Conflict` where accounts or a schedule would be replaced."""
    found = len(accounts.users), len(accounts.keys), len(accounts.tokens)
    if any(found):
        users, keys, tokens = found
        raise Conflict(
            f"the server has {users} users, {keys} keys and {tokens} tokens, which the backup's "
            'would replace; give --replace ("replace": true) to let it',
            code="EntityAlreadyExists",
        )
    if now not in (ScheduleChanges(), restored):
        raise Conflict(
            "the server's schedule was changed, and the backup's would replace it; give --replace "
            '("replace": true) to let it',
            code="EntityAlreadyExists",
        )


def check_buckets(
    existing: dict[str, BucketInfo], restored: tuple[BucketInfo, ...], replace: bool
) -> None:
    """Raise `Conflict` for a bucket that would be another one, or be configured anew."""
    for info in restored:
        found = existing.get(info.name)
        if found is None:
            continue
        if found.owner != info.owner or found.layout not in (None, info.layout):
            raise Conflict(
                f"bucket {info.name!r} is here with another owner or KV layout, which no restore "
                "changes; delete it first",
                code="BucketAlreadyExists",
            )
        same = (found.policy, found.configuration) == (info.policy, info.configuration)
        if not same and not replace:
            raise Conflict(
                f"bucket {info.name!r} is here with another policy or configuration; restore with "
                "replace to let the backup's replace it",
                code="BucketAlreadyExists",
            )


async def _restore_bucket(
    storage: StorageFleet, info: BucketInfo, found: BucketInfo | None
) -> bool:
    """False where the engine has no encodings, and the bucket's policy has one: it is left out."""
    if found is None:
        create = CreateBucket(
            name=info.name,
            owner=info.owner,
            region=info.region,
            configuration=info.configuration,
        )
        await storage.call(create, Done)
    policy = found.policy if found else BucketPolicy()
    configuration = found.configuration if found else info.configuration
    if info.layout is not None:
        await storage.call(SetLayout(bucket=info.name, layout=info.layout), Done)
    is_whole = info.policy == policy or await _set_policy(storage, info)
    if info.configuration != configuration:
        await change_configuration(storage, info.name, lambda _: info.configuration)
    return is_whole


async def _set_policy(storage: StorageFleet, info: BucketInfo) -> bool:
    try:
        await storage.call(SetPolicy(bucket=info.name, policy=info.policy), Done)
    except Unsupported:
        if info.policy.encoding is None:
            raise
        plain = msgspec.structs.replace(info.policy, encoding=None)
        await storage.call(SetPolicy(bucket=info.name, policy=plain), Done)
        return False
    return True


ROUTES = (
    Route(
        *("POST", "/v1/backup", SCOPE_ADMIN, "Everything but the objects, secrets sealed"),
        *(make_backup, Backup, BackupRequest),
    ),
    Route(
        *("POST", "/v1/restore", SCOPE_ADMIN, "Bring back what a backup holds", restore),
        *(RestoreReply, RestoreRequest),
        body_bytes_max=BACKUP_BYTES_MAX,
    ),
)
