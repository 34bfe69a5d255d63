"""The names that commands take, with completion from the server where one answers at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated

import typer

from objectcache_operations.admin.command import Server, find_access

if TYPE_CHECKING:
    from objectcache_operations.admin.api_client import ApiClient

COMPLETION_TIMEOUT_S = 1.0


def _completed(
    context: typer.Context, begun: str, names_of: Callable[[ApiClient], list[str]]
) -> list[str]:
    """Names that begin with what is written; none where no server answers."""
    from objectcache_operations.admin.api_client import ApiClient
    from objectcache_schemas.errors import ObjectCacheError

    flags = {one.name for one in fields(Server)} & context.params.keys()
    server = Server(**{name: context.params[name] for name in flags})
    try:
        with ApiClient(find_access(server, os.environ), COMPLETION_TIMEOUT_S) as client:
            return [name for name in names_of(client) if name.startswith(begun)]
    except (ObjectCacheError, typer.Exit):
        return []


def _users(context: typer.Context, begun: str) -> list[str]:
    from objectcache_schemas.operators.admin_api import UserList

    return _completed(
        context,
        begun,
        lambda client: [one.name for one in client.get("/v1/users?limit=1000", UserList).users],
    )


def _keys(context: typer.Context, begun: str) -> list[str]:
    from objectcache_schemas.operators.admin_api import KeyList

    return _completed(
        context,
        begun,
        lambda client: [one.access_key for one in client.get("/v1/keys?limit=1000", KeyList).keys],
    )


def _buckets(context: typer.Context, begun: str) -> list[str]:
    from objectcache_schemas.operators.admin_api import BucketList

    return _completed(
        context,
        begun,
        lambda client: [
            one.name for one in client.get("/v1/buckets?limit=1000", BucketList).buckets
        ],
    )


def _tokens(context: typer.Context, begun: str) -> list[str]:
    from objectcache_schemas.operators.admin_api import TokenList

    return _completed(
        context,
        begun,
        lambda client: [one.token_id for one in client.get("/v1/tokens", TokenList).tokens],
    )


UserName = Annotated[str, typer.Argument(metavar="USER", show_default=False, autocompletion=_users)]
AccessKeyName = Annotated[
    str, typer.Argument(metavar="ACCESS_KEY", show_default=False, autocompletion=_keys)
]
BucketName = Annotated[
    str, typer.Argument(metavar="BUCKET", show_default=False, autocompletion=_buckets)
]
TokenId = Annotated[
    str, typer.Argument(metavar="TOKEN_ID", show_default=False, autocompletion=_tokens)
]
UserOption = Annotated[
    str | None, typer.Option("--user", metavar="USER", autocompletion=_users, help="Of this user.")
]
BucketOption = Annotated[
    str | None,
    typer.Option("--bucket", metavar="BUCKET", autocompletion=_buckets, help="Of this bucket."),
]
