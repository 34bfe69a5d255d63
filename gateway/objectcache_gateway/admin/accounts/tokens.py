"""Tokens of the admin API."""

from __future__ import annotations

import msgspec

from objectcache_gateway.admin.serving.authentication import new_token, token_sha256
from objectcache_gateway.admin.serving.routes import Call, Nothing, Route
from objectcache_gateway.admin.serving.scopes import uncovered
from objectcache_schemas.accounts import AdminToken, DeleteToken, PutToken
from objectcache_schemas.errors import AccessDenied
from objectcache_schemas.operators.admin_api import NewToken, NewTokenReply, TokenList, TokenView


def token_view(token: AdminToken) -> TokenView:
    """A token without what it is."""
    return msgspec.convert(token, TokenView, from_attributes=True)


async def list_tokens(call: Call[Nothing, Nothing]) -> TokenList:
    """All tokens; there are 1,024 at most."""
    tokens = (await call.accounts.look()).tokens
    return TokenList(tokens=tuple(token_view(tokens[token_id]) for token_id in sorted(tokens)))


async def add_token(call: Call[NewToken, Nothing]) -> NewTokenReply:
    """Make a token. Nobody gives more than they have."""
    new = call.body
    refused = uncovered(call.asker.scopes, new.scopes)
    if refused is not None:
        raise AccessDenied(f"you do not have the scope {refused!r}, so you cannot give it")
    text, token_id = new_token()
    token = AdminToken(
        token_id=token_id,
        name=new.name,
        token_sha256=token_sha256(text),
        scopes=tuple(dict.fromkeys(new.scopes)),
        created_s=call.now_s,
        expires_s=None if new.lifetime_s is None else call.now_s + new.lifetime_s,
    )
    await call.accounts.change(PutToken(token=token))
    return NewTokenReply(token=text, view=token_view(token))


async def delete_token(call: Call[Nothing, Nothing]) -> None:
    """Delete a token; it is refused from now on."""
    token = (await call.accounts.look()).token(call.names["token_id"])
    await call.accounts.change(DeleteToken(token_id=token.token_id))


ROUTES = (
    Route("GET", "/v1/tokens", "tokens:read", "List tokens", list_tokens, TokenList),
    Route(
        *("POST", "/v1/tokens", "tokens:write", "Add a token", add_token),
        *(NewTokenReply, NewToken),
        status=201,
    ),
    Route(
        *("DELETE", "/v1/tokens/{token_id}", "tokens:write", "Delete a token", delete_token),
        status=204,
    ),
)
