"""`objectcache admin token`: who else may use the admin API, and for what."""

from __future__ import annotations

from typing import Annotated

import typer

from objectcache_operations.admin.command import (
    Server,
    errors_end_the_command,
    on_server,
    print_document,
    print_view,
)
from objectcache_operations.admin.name_arguments import TokenId

token_app = typer.Typer(help="Tokens of the admin API.", no_args_is_help=True)


@token_app.command("create")
@on_server
def create_token(
    server: Server,
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False)],
    scope: Annotated[
        list[str],
        typer.Option(
            metavar="SCOPE",
            help="admin, read, or RESOURCE:read, RESOURCE:write; may be repeated.",
            show_default=False,
        ),
    ],
    expires: Annotated[
        str, typer.Option(metavar="TIME|none", help="From now, such as 90d.")
    ] = "30d",
) -> None:
    """Create a token and print it. It is shown once."""
    from objectcache_runtime.amounts import parse_lifetime_s
    from objectcache_schemas.errors import InvalidRequest
    from objectcache_schemas.operators.admin_api import NewToken, NewTokenReply

    with errors_end_the_command():
        lifetime_s = parse_lifetime_s(expires)
        try:
            new = NewToken(name=name, scopes=tuple(scope), lifetime_s=lifetime_s)
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
    with server.connect() as client:
        made = client.send("POST", "/v1/tokens", new, NewTokenReply)
    server.show(made, lambda: [made.token])


@token_app.command("list")
@on_server
def list_tokens(server: Server) -> None:
    """List tokens."""
    from objectcache_operations.admin.tables import date_text, table_of
    from objectcache_schemas.operators.admin_api import TokenList

    with server.connect() as client:
        found = client.get("/v1/tokens", TokenList)
    if server.as_json:
        print_document(found)
        return
    rows = [
        [one.token_id, one.name, " ".join(one.scopes), date_text(one.expires_s)]
        for one in found.tokens
    ]
    print_view(table_of(("token", "name", "scopes", "expires"), rows))


@token_app.command("remove")
@on_server
def remove_token(server: Server, token_id: TokenId) -> None:
    """Remove a token; it is refused from now on."""
    from objectcache_operations.admin.api_client import path_of

    with server.connect() as client:
        client.delete(path_of("tokens", token_id))
    server.show({"removed": token_id}, lambda: [f"token {token_id} is removed"])
