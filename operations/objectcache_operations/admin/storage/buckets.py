"""`objectcache admin bucket`, `pin` and `unpin`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from objectcache_operations.admin.accounts.quota import (
    Deliveries,
    InFlight,
    Objects,
    Requests,
    Stored,
    change_quota,
)
from objectcache_operations.admin.command import (
    Server,
    errors_end_the_command,
    on_server,
    print_document,
    print_view,
)
from objectcache_operations.admin.name_arguments import BucketName, UserOption

if TYPE_CHECKING:
    from objectcache_schemas.layout import KvLayout
    from objectcache_schemas.operators.admin_api import BucketView
    from objectcache_schemas.records import EtagMode

bucket_app = typer.Typer(help="Buckets, and what is chosen for them.", no_args_is_help=True)

Keys = Annotated[list[str], typer.Argument(metavar="KEY...", show_default=False)]
EtagModeName = Annotated[str, typer.Argument(metavar="md5|opaque", show_default=False)]


@bucket_app.command("list")
@on_server
def list_buckets(server: Server, user: UserOption = None) -> None:
    """List buckets, of all users or one."""
    from objectcache_operations.admin.accounts.quotas import counted_text, used_text
    from objectcache_operations.admin.pages import every_bucket
    from objectcache_operations.admin.tables import table_of

    with server.connect() as client:
        buckets = every_bucket(client, user)
    if server.as_json:
        print_document({"buckets": buckets})
        return
    rows = [
        [
            one.name,
            one.owner,
            counted_text(one.object_count, one.configuration.quota.object_count),
            used_text(one.stored_bytes, one.configuration.quota.stored_bytes),
            layout_text(one.layout),
        ]
        for one in buckets
    ]
    columns = ("bucket", "owner", "objects", "stored", "KV layout")
    print_view(table_of(columns, rows, ("objects", "stored")))


def layout_text(layout: KvLayout | None) -> str:
    """A KV layout on one line."""
    if layout is None:
        return "-"
    slices = f"{layout.num_layers} x {layout.per_layer_chunk_bytes:,} B"
    return f"{slices}, {layout.chunk_tokens} tokens, {layout.dtype}, {layout.fingerprint}"


@bucket_app.command("show")
@on_server
def show_bucket(server: Server, name: BucketName) -> None:
    """Show a bucket: owner, layout, use, policy, quota, lifecycle."""
    from objectcache_operations.admin.api_client import path_of
    from objectcache_schemas.operators.admin_api import BucketView

    with server.connect() as client:
        bucket = client.get(path_of("buckets", name), BucketView)
    server.show(bucket, lambda: bucket_lines(bucket))


def bucket_lines(bucket: BucketView) -> list[str]:
    """A bucket, a line for each thing."""
    from objectcache_operations.admin.accounts.quotas import quota_lines, used_text
    from objectcache_operations.admin.printable import printable
    from objectcache_operations.admin.storage.policies import policy_lines
    from objectcache_operations.admin.tables import date_text

    configuration = bucket.configuration
    rules = [
        f"lifecycle     {printable(rule.rule_id)}: {printable(rule.prefix) or 'every key'}, "
        f"{'' if rule.enabled else 'off, '}expires after {rule.expiration_days or '-'} days, "
        f"uploads after {rule.abort_uploads_days or '-'} days"
        for rule in configuration.lifecycle
    ]
    return [
        *policy_lines(bucket.name, bucket.policy),
        f"owner         {bucket.owner}, since {date_text(bucket.created_s)}",
        f"holds         {bucket.object_count:,} objects, {used_text(bucket.stored_bytes, None)}",
        *_encoded_line(bucket),
        f"KV layout     {printable(layout_text(bucket.layout))}",
        f"ETag          {configuration.etag_mode.value}",
        *(f"quota {line}" for line in quota_lines(configuration.quota)),
        *rules,
    ]


def _encoded_line(bucket: BucketView) -> Iterator[str]:
    from objectcache_operations.admin.accounts.quotas import used_text

    if bucket.encoded_bytes:
        yield (
            f"encoded       {used_text(bucket.decoded_bytes, None)} in "
            f"{used_text(bucket.encoded_bytes, None)} "
            f"(1/{bucket.decoded_bytes / bucket.encoded_bytes:.2f})"
        )


@bucket_app.command("create")
@on_server
def create_bucket(
    server: Server,
    name: Annotated[str, typer.Argument(metavar="BUCKET", show_default=False)],
    owner: Annotated[str, typer.Option(metavar="USER", help="Whose it is.")] = "root",
    layers: Annotated[int | None, typer.Option(help="KV layout: layers.")] = None,
    chunk_tokens: Annotated[int | None, typer.Option(help="KV layout: tokens of a chunk.")] = None,
    slice_bytes: Annotated[
        int | None, typer.Option(help="KV layout: bytes of one layer of a chunk.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="KV layout: such as bfloat16.")] = "bfloat16",
    fingerprint: Annotated[
        str | None, typer.Option(help="KV layout: what tells model and version apart.")
    ] = None,
    etag: Annotated[
        str, typer.Option(metavar="md5|opaque", help="opaque saves hashing what is put.")
    ] = "md5",
) -> None:
    """Make a bucket for a user, with a KV layout where one is given."""
    from objectcache_schemas.operators.admin_api import BucketView, NewBucket

    with errors_end_the_command():
        layout = layout_of(layers, chunk_tokens, slice_bytes, dtype, fingerprint)
        new = NewBucket(name=name, owner=owner, layout=layout, etag_mode=etag_mode_of(etag))
    with server.connect() as client:
        bucket = client.send("POST", "/v1/buckets", new, BucketView)
    server.show(bucket, lambda: [f"bucket {bucket.name} of {bucket.owner} is made"])


def layout_of(
    layers: int | None,
    chunk_tokens: int | None,
    slice_bytes: int | None,
    dtype: str,
    fingerprint: str | None,
) -> KvLayout | None:
    """The layout of the flags, None without any; raises `InvalidRequest` where one is missing."""
    from objectcache_schemas.errors import InvalidRequest
    from objectcache_schemas.layout import KvLayout

    if layers is None and chunk_tokens is None and slice_bytes is None and fingerprint is None:
        return None
    if layers is None or chunk_tokens is None or slice_bytes is None or not fingerprint:
        raise InvalidRequest(
            "a KV layout needs --layers, --chunk-tokens, --slice-bytes and --fingerprint"
        )
    return KvLayout(
        num_layers=layers,
        chunk_tokens=chunk_tokens,
        per_layer_chunk_bytes=slice_bytes,
        dtype=dtype,
        fingerprint=fingerprint,
    )


def etag_mode_of(text: str) -> EtagMode:
    """The ETag mode of this name."""
    from objectcache_schemas.errors import InvalidRequest
    from objectcache_schemas.records import EtagMode

    known = [mode.value for mode in EtagMode]
    if text not in known:
        raise InvalidRequest(f"{text!r} is no ETag mode; give one of {', '.join(known)}")
    return EtagMode(text)


@bucket_app.command()
@on_server
def policy(
    server: Server,
    name: BucketName,
    durability: Annotated[
        str | None, typer.Option(metavar="sync|async", help="When a put is acknowledged.")
    ] = None,
    verification: Annotated[
        str | None, typer.Option(metavar="full|sampled|off", help="Which reads are checked.")
    ] = None,
    quota: Annotated[
        str | None, typer.Option(metavar="SIZE|none", help="Most stored bytes, such as 10GiB.")
    ] = None,
    ttl: Annotated[
        str | None, typer.Option(metavar="TIME|none", help="Life of an object, such as 7d.")
    ] = None,
    reads: Annotated[
        str | None,
        typer.Option(
            metavar="fresh|indexed|auto", help="What reads see of other servers of one store."
        ),
    ] = None,
    encoding: Annotated[
        str | None,
        typer.Option(
            metavar="planes-zstd|planes-deflate|none", help="How chunks are stored from now on."
        ),
    ] = None,
) -> None:
    """Show a bucket's policy, or change what is given and leave the rest."""
    from objectcache_operations.admin.api_client import path_of
    from objectcache_operations.admin.storage.policies import (
        PolicyFlags,
        changes_of,
        policy_document,
        policy_lines,
    )
    from objectcache_schemas.operators.admin_api import BucketView, PolicyChange
    from objectcache_schemas.records import BucketPolicy

    with errors_end_the_command():
        changes = changes_of(PolicyFlags(durability, verification, quota, ttl, reads, encoding))
    with server.connect() as client:
        if changes:
            path = path_of("buckets", name, "policy")
            found = client.send("PATCH", path, PolicyChange(**changes), BucketPolicy)
        else:
            found = client.get(path_of("buckets", name), BucketView).policy
    server.show(policy_document(name, found), lambda: policy_lines(name, found))


@bucket_app.command()
@on_server
def etag(server: Server, name: BucketName, mode: EtagModeName) -> None:
    """Choose what the ETag of a put says: its MD5, or nothing, which saves hashing."""
    from objectcache_operations.admin.api_client import path_of
    from objectcache_schemas.operators.admin_api import ConfigurationChange
    from objectcache_schemas.records import BucketConfiguration

    with errors_end_the_command():
        change = ConfigurationChange(etag_mode=etag_mode_of(mode))
    with server.connect() as client:
        path = path_of("buckets", name, "configuration")
        found = client.send("PATCH", path, change, BucketConfiguration)
    server.show(found, lambda: [f"ETags of puts to {name} are {found.etag_mode.value}"])


@bucket_app.command()
@on_server
def quota(
    server: Server,
    name: BucketName,
    stored: Stored = None,
    objects: Objects = None,
    requests: Requests = None,
    in_flight: InFlight = None,
    deliveries: Deliveries = None,
) -> None:
    """Change what is given of a bucket's quota and leave the rest."""
    from objectcache_operations.admin.accounts.quotas import QuotaFlags
    from objectcache_operations.admin.api_client import path_of

    flags = QuotaFlags(stored, objects, requests, in_flight, deliveries)
    change_quota(server, path_of("buckets", name, "quota"), flags)


@bucket_app.command("remove")
@on_server
def remove_bucket(server: Server, name: BucketName) -> None:
    """Remove an empty bucket."""
    from objectcache_operations.admin.api_client import path_of

    with server.connect() as client:
        client.delete(path_of("buckets", name))
    server.show({"removed": name}, lambda: [f"bucket {name} is removed"])


# --- pins -----------------------------------------------------------------------------------------


@on_server
def pin(server: Server, bucket: BucketName, keys: Keys) -> None:
    """Keep objects from eviction and expiry. Keys that are not stored do not count."""
    _pin(server, bucket, keys, pinned=True)


@on_server
def unpin(server: Server, bucket: BucketName, keys: Keys) -> None:
    """Let objects be evicted and expire again."""
    _pin(server, bucket, keys, pinned=False)


def _pin(server: Server, bucket: str, keys: list[str], *, pinned: bool) -> None:
    from objectcache_operations.admin.api_client import path_of
    from objectcache_schemas.operators.admin_api import Pins, PinsReply

    with server.connect() as client:
        pins = Pins(keys=tuple(keys), pinned=pinned)
        count = client.send("POST", path_of("buckets", bucket, "pins"), pins, PinsReply).count
    missing = len(keys) - count
    rest = f"; {missing} not stored" if missing else ""
    server.show(
        {"bucket": bucket, "pinned": pinned, "asked": len(keys), "count": count},
        lambda: [f"{count} of {len(keys)} {'pinned' if pinned else 'unpinned'}{rest}"],
    )
