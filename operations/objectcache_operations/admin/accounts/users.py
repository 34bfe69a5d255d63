"""`objectcache admin user` and `grant`: who may ask, and for what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from objectcache_operations.admin.accounts.keys import (
    AccessKeyOption,
    SecretKeyOption,
    key_rows,
    pair_lines,
)
from objectcache_operations.admin.command import (
    Server,
    errors_end_the_command,
    on_server,
    print_document,
    print_view,
    read_secret,
)
from objectcache_operations.admin.name_arguments import BucketName, UserName

if TYPE_CHECKING:
    from objectcache_schemas.accounts import Grant
    from objectcache_schemas.operators.admin_api import GrantList, NewUser, UserView

user_app = typer.Typer(help="Users: the owners of buckets.", no_args_is_help=True)
grant_app = typer.Typer(help="Access of users to others' buckets.", no_args_is_help=True)

NewUserName = Annotated[str, typer.Argument(metavar="NAME", show_default=False)]
Prefix = Annotated[str, typer.Option(metavar="PREFIX", help="Only keys that begin so.")]


@user_app.command("add")
@on_server
def add_user(
    server: Server,
    name: NewUserName,
    access_key: AccessKeyOption = None,
    secret_key: SecretKeyOption = None,
    no_key: Annotated[bool, typer.Option("--no-key", help="Make no key pair yet.")] = False,
    no_buckets: Annotated[
        bool, typer.Option("--no-buckets", help="The user may not make buckets.")
    ] = False,
    grant: Annotated[
        list[str] | None,
        typer.Option(metavar="BUCKET[/PREFIX]=ACCESS,...", help="May be repeated."),
    ] = None,
) -> None:
    """Add a user and print its key pair. The secret is shown once."""
    from objectcache_operations.admin.accounts.grants import grant_of
    from objectcache_schemas.operators.admin_api import NewUserReply

    with errors_end_the_command():
        new = _new_user(
            name=name,
            may_create_buckets=not no_buckets,
            grants=[grant_of(text) for text in grant or ()],
            with_key=not no_key,
            access_key=access_key,
            secret_key=read_secret(secret_key, "--secret-key"),
        )
    with server.connect() as client:
        made = client.send("POST", "/v1/users", new, NewUserReply)
    server.show(made, lambda: [f"user        {name}", *(pair_lines(made.key) if made.key else [])])


@user_app.command("list")
@on_server
def list_users(server: Server) -> None:
    """List users."""
    from objectcache_operations.admin.pages import every_user
    from objectcache_operations.admin.tables import date_text, table_of

    with server.connect() as client:
        users = every_user(client)
    if server.as_json:
        print_document({"users": users})
        return
    rows = [
        [one.name, _state(one), f"{one.key_count}", f"{len(one.grants)}", date_text(one.created_s)]
        for one in users
    ]
    print_view(table_of(("user", "state", "keys", "grants", "since"), rows, ("keys", "grants")))


@user_app.command("show")
@on_server
def show_user(server: Server, name: UserName) -> None:
    """Show a user with its grants, quota and keys."""
    from objectcache_operations.admin.api_client import path_of
    from objectcache_operations.admin.pages import every_key
    from objectcache_schemas.operators.admin_api import UserView

    with server.connect() as client:
        user = client.get(path_of("users", name), UserView)
        keys = every_key(client, name)
    if server.as_json:
        print_document({"user": user, "keys": keys})
        return
    from objectcache_operations.admin.accounts.quotas import quota_lines

    for line in (*_user_lines(user), *quota_lines(user.quota)):
        typer.echo(line)
    if keys:
        print_view(key_rows(keys))


def _user_lines(user: UserView) -> list[str]:
    from objectcache_operations.admin.accounts.grants import grants_text

    makes = "may make buckets" if user.may_create_buckets else "may not make buckets"
    return [
        f"user          {user.name}",
        f"state         {_state(user)}, {makes}",
        f"grants        {grants_text(user.grants)}",
    ]


def _state(user: UserView) -> str:
    return "enabled" if user.enabled else "disabled"


@user_app.command("remove")
@on_server
def remove_user(server: Server, name: UserName) -> None:
    """Remove a user that owns no bucket, and its keys."""
    from objectcache_operations.admin.api_client import path_of

    with server.connect() as client:
        client.delete(path_of("users", name))
    server.show({"removed": name}, lambda: [f"user {name} is removed"])


@user_app.command("disable")
@on_server
def disable_user(server: Server, name: UserName) -> None:
    """Refuse all that a user asks, until it is enabled again."""
    _enable(server, name, enabled=False)


@user_app.command("enable")
@on_server
def enable_user(server: Server, name: UserName) -> None:
    """Serve a user again."""
    _enable(server, name, enabled=True)


def _enable(server: Server, name: str, *, enabled: bool) -> None:
    from objectcache_operations.admin.api_client import path_of
    from objectcache_schemas.operators.admin_api import UserChange, UserView

    with server.connect() as client:
        change = UserChange(enabled=enabled)
        user = client.send("PATCH", path_of("users", name), change, UserView)
    server.show(user, lambda: [f"user {user.name} is {_state(user)}"])


def _new_user(
    *,
    name: str,
    may_create_buckets: bool,
    grants: list[Grant],
    with_key: bool,
    access_key: str | None,
    secret_key: str | None,
) -> NewUser:
    """The request, refused here as the server would refuse it."""
    from objectcache_schemas.errors import InvalidRequest
    from objectcache_schemas.operators.admin_api import NewUser

    try:
        return NewUser(
            name=name,
            may_create_buckets=may_create_buckets,
            grants=tuple(grants),
            with_key=with_key,
            access_key=access_key,
            secret_key=secret_key,
        )
    except ValueError as error:
        raise InvalidRequest(str(error)) from error


# --- grants ---------------------------------------------------------------------------------------


@grant_app.command("add")
@on_server
def add_grant(
    server: Server,
    name: UserName,
    bucket: BucketName,
    access: Annotated[
        list[str], typer.Argument(metavar="ACCESS...", help="Some of read, write, admin.")
    ],
    prefix: Prefix = "",
) -> None:
    """Give a user access to a bucket; * is every bucket."""
    from objectcache_operations.admin.accounts.grants import access_of
    from objectcache_operations.admin.api_client import path_of
    from objectcache_schemas.operators.admin_api import GrantList, NewGrant

    with errors_end_the_command():
        new = NewGrant(bucket=bucket, prefix=prefix, access=access_of(access))
    with server.connect() as client:
        reply = client.send("POST", path_of("users", name, "grants"), new, GrantList)
    _show_grants(server, reply)


@grant_app.command("remove")
@on_server
def remove_grant(
    server: Server,
    name: UserName,
    bucket: BucketName,
    access: Annotated[
        str | None, typer.Argument(metavar="[ACCESS]", help="Default: all of it.")
    ] = None,
    prefix: Prefix = "",
) -> None:
    """Take a user's access to a bucket away."""
    from objectcache_operations.admin.accounts.grants import access_of
    from objectcache_operations.admin.api_client import path_of
    from objectcache_schemas.operators.admin_api import GrantList

    with errors_end_the_command():
        which = access_of([access])[0].value if access else ""
    with server.connect() as client:
        where = path_of("users", name, "grants")
        client.delete(where, bucket=bucket, prefix=prefix, access=which)
        reply = client.get(where, GrantList)
    _show_grants(server, reply)


@grant_app.command("list")
@on_server
def list_grants(server: Server, name: UserName) -> None:
    """List a user's grants."""
    from objectcache_operations.admin.api_client import path_of
    from objectcache_schemas.operators.admin_api import GrantList

    with server.connect() as client:
        reply = client.get(path_of("users", name, "grants"), GrantList)
    _show_grants(server, reply)


def _show_grants(server: Server, reply: GrantList) -> None:
    from objectcache_operations.admin.accounts.grants import grant_text

    server.show(reply, lambda: [grant_text(grant) for grant in reply.grants] or ["no grants"])
