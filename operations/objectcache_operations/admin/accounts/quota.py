"""`objectcache admin quota`: limits of a user or a bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from objectcache_operations.admin.command import Server, errors_end_the_command, on_server
from objectcache_operations.admin.name_arguments import BucketOption, UserOption
from objectcache_operations.console.failing import fail

if TYPE_CHECKING:
    from objectcache_operations.admin.accounts.quotas import QuotaFlags

quota_app = typer.Typer(help="Limits of users and buckets.", no_args_is_help=True)

Stored = Annotated[str | None, typer.Option(metavar="SIZE|none", help="Stored bytes.")]
Objects = Annotated[str | None, typer.Option(metavar="NUMBER|none", help="Stored objects.")]
Requests = Annotated[str | None, typer.Option(metavar="NUMBER|none", help="Requests a second.")]
InFlight = Annotated[
    str | None, typer.Option(metavar="SIZE|none", help="Bytes of puts and deliveries in flight.")
]
Deliveries = Annotated[str | None, typer.Option(metavar="NUMBER|none", help="Deliveries at once.")]


@quota_app.command("set")
@on_server
def set_quota(
    server: Server,
    user: UserOption = None,
    bucket: BucketOption = None,
    stored: Stored = None,
    objects: Objects = None,
    requests: Requests = None,
    in_flight: InFlight = None,
    deliveries: Deliveries = None,
) -> None:
    """Change what is given of a quota and leave the rest."""
    from objectcache_operations.admin.accounts.quotas import QuotaFlags

    flags = QuotaFlags(stored, objects, requests, in_flight, deliveries)
    change_quota(server, _path(user, bucket), flags)


@quota_app.command("show")
@on_server
def show_quota(server: Server, user: UserOption = None, bucket: BucketOption = None) -> None:
    """Show a quota."""
    from objectcache_operations.admin.accounts.quotas import quota_lines
    from objectcache_schemas.records import Quota

    path = _path(user, bucket)
    with server.connect() as client:
        quota = client.get(path, Quota)
    server.show(quota, lambda: quota_lines(quota))


def _path(user: str | None, bucket: str | None) -> str:
    from objectcache_operations.admin.api_client import path_of

    if (user is None) == (bucket is None):
        fail("give --user USER or --bucket BUCKET, one of the two")
    return path_of("users", user, "quota") if user else path_of("buckets", bucket or "", "quota")


def change_quota(server: Server, path: str, flags: QuotaFlags) -> None:
    """Change the quota there, and show what is then in force."""
    from objectcache_operations.admin.accounts.quotas import quota_change, quota_lines
    from objectcache_schemas.records import Quota

    with errors_end_the_command():
        change = quota_change(flags)
    with server.connect() as client:
        quota = client.send("PATCH", path, change, Quota)
    server.show(quota, lambda: quota_lines(quota))
