"""`objectcache admin key`: users' key pairs, and their rotation."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from objectcache_operations.admin.command import (
    Server,
    errors_end_the_command,
    on_server,
    print_document,
    print_view,
    read_secret,
)
from objectcache_operations.admin.name_arguments import AccessKeyName, UserName, UserOption

if TYPE_CHECKING:
    from msgspec import UnsetType
    from rich.table import Table

    from objectcache_schemas.operators.admin_api import KeyChange, KeyView, NewKeyPair

key_app = typer.Typer(help="Key pairs of users.", no_args_is_help=True)

AccessKeyOption = Annotated[
    str | None, typer.Option(metavar="KEY", help="Default: made up by the server.")
]
SecretKeyOption = Annotated[
    str | None,
    typer.Option(metavar="SECRET|-", help="- reads a line of standard input. Default: made up."),
]


@key_app.command("add")
@on_server
def add_key(
    server: Server,
    user: UserName,
    access_key: AccessKeyOption = None,
    secret_key: SecretKeyOption = None,
    expires: Annotated[
        str | None, typer.Option(metavar="TIME|none", help="From now, such as 12h. Default: none.")
    ] = None,
    scope: Annotated[
        list[str] | None,
        typer.Option(
            metavar="BUCKET[/PREFIX]=ACCESS,...",
            help="All that the key may, of what its user may; may be repeated.",
        ),
    ] = None,
    note: Annotated[str, typer.Option(metavar="TEXT", help="For people.")] = "",
) -> None:
    """Add a key pair of a user and print it. The secret is shown once."""
    from objectcache_operations.admin.accounts.grants import grant_of
    from objectcache_runtime.amounts import parse_lifetime_s
    from objectcache_schemas.errors import InvalidRequest
    from objectcache_schemas.operators.admin_api import NewKey, NewKeyPair

    with errors_end_the_command():
        try:
            new = NewKey(
                user=user,
                access_key=access_key,
                secret_key=read_secret(secret_key, "--secret-key"),
                lifetime_s=parse_lifetime_s(expires) if expires else None,
                scope=tuple(grant_of(text) for text in scope or ()),
                note=note,
            )
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
    with server.connect() as client:
        pair = client.send("POST", "/v1/keys", new, NewKeyPair)
    server.show(pair, lambda: [f"user        {pair.user}", *pair_lines(pair)])


@key_app.command("list")
@on_server
def list_keys(server: Server, user: UserOption = None) -> None:
    """List keys, of all users or one."""
    from objectcache_operations.admin.pages import every_key

    with server.connect() as client:
        keys = every_key(client, user)
    if server.as_json:
        print_document({"keys": keys})
    else:
        print_view(key_rows(keys))


def pair_lines(pair: NewKeyPair) -> list[str]:
    """A key pair that was made, as it is shown once."""
    from objectcache_operations.admin.tables import date_text

    lines = [f"access key  {pair.access_key}", f"secret key  {pair.secret_key}"]
    return [*lines, f"expires     {date_text(pair.expires_s)}"] if pair.expires_s else lines


def key_rows(keys: Iterable[KeyView]) -> Table:
    """Keys, a row each."""
    from objectcache_operations.admin.accounts.grants import grants_text
    from objectcache_operations.admin.tables import date_text, table_of

    rows = [
        [
            key.access_key,
            key.user,
            _state(key),
            date_text(key.created_s),
            date_text(key.expires_s),
            grants_text(key.scope, "all"),
            key.note,
        ]
        for key in keys
    ]
    return table_of(("access key", "user", "state", "since", "expires", "scope", "note"), rows)


def _state(key: KeyView) -> str:
    if key.expires_s is not None and key.expires_s <= time.time():
        return "expired"
    return "enabled" if key.enabled else "disabled"


@key_app.command("rotate")
@on_server
def rotate_key(
    server: Server,
    access_key: AccessKeyName,
    overlap: Annotated[
        str, typer.Option(metavar="TIME|none", help="How long the old key still works.")
    ] = "1d",
    expires: Annotated[
        str | None,
        typer.Option(
            metavar="TIME|none", help="Of the new pair, from now. Default: when the old one would."
        ),
    ] = None,
) -> None:
    """Make another pair of the same user and scope, and let this one end after the overlap."""
    from objectcache_operations.admin.api_client import path_of
    from objectcache_operations.admin.tables import date_text
    from objectcache_runtime.amounts import parse_lifetime_s
    from objectcache_schemas.operators.admin_api import RotatedKey, Rotation

    with errors_end_the_command():
        rotation = Rotation(
            overlap_s=parse_lifetime_s(overlap) or 0.0,
            lifetime_s=_lifetime_s(expires),
        )
    with server.connect() as client:
        made = client.send("POST", path_of("keys", access_key, "rotation"), rotation, RotatedKey)
    ends = f"{made.old.access_key} ends at {date_text(made.old.expires_s)} UTC"
    server.show(made, lambda: [f"user        {made.key.user}", *pair_lines(made.key), ends])


def _lifetime_s(expires: str | None) -> float | UnsetType | None:
    """Absent where nothing is said, null for no end."""
    from msgspec import UNSET

    from objectcache_runtime.amounts import parse_lifetime_s

    return UNSET if expires is None else parse_lifetime_s(expires)


@key_app.command("remove")
@on_server
def remove_key(server: Server, access_key: AccessKeyName) -> None:
    """Remove a key."""
    from objectcache_operations.admin.api_client import path_of

    with server.connect() as client:
        client.delete(path_of("keys", access_key))
    server.show({"removed": access_key}, lambda: [f"key {access_key} is removed"])


@key_app.command("disable")
@on_server
def disable_key(server: Server, access_key: AccessKeyName) -> None:
    """Refuse what is signed with a key, until it is enabled again."""
    from objectcache_schemas.operators.admin_api import KeyChange

    _change(server, access_key, KeyChange(enabled=False))


@key_app.command("enable")
@on_server
def enable_key(server: Server, access_key: AccessKeyName) -> None:
    """Take what is signed with a key again."""
    from objectcache_schemas.operators.admin_api import KeyChange

    _change(server, access_key, KeyChange(enabled=True))


def _change(server: Server, access_key: str, change: KeyChange) -> None:
    from objectcache_operations.admin.api_client import path_of
    from objectcache_schemas.operators.admin_api import KeyView

    with server.connect() as client:
        key = client.send("PATCH", path_of("keys", access_key), change, KeyView)
    server.show(key, lambda: [f"key {key.access_key} of {key.user} is {_state(key)}"])
