"""Who asks the admin API: a bearer token, the root key, or whoever runs the server."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
from collections.abc import Mapping

from objectcache_gateway.admin.serving.routes import ApiCaller
from objectcache_gateway.request.request_head import RequestHead
from objectcache_gateway.signing.credentials import RootCredentials
from objectcache_gateway.signing.sigv4 import Authenticated, Payload, SigningKeys, authenticate
from objectcache_runtime.logs import clean
from objectcache_schemas.accounts import ROOT_USER, AdminToken
from objectcache_schemas.errors import AccessDenied, ObjectCacheError
from objectcache_schemas.operators.admin_api import SCOPE_ADMIN, SIGNING_SERVICE

BEARER = "bearer"  # a scheme is written in any case
TOKEN_PREFIX = "oct_"  # noqa: S105 - lets scanners of repositories find one
TOKEN_CHARS_MAX = 256
_NO_TOKEN_SHA256 = hashlib.sha256(b"").hexdigest()
_PEER = struct.Struct("iII")  # pid, uid, gid: struct ucred


def new_token() -> tuple[str, str]:
    """A token and its id: 256 random bits, and 64 more that name it in lists and logs."""
    token_id = secrets.token_hex(8)
    return f"{TOKEN_PREFIX}{token_id}_{secrets.token_urlsafe(32)}", token_id


def token_sha256(token: str) -> str:
    """What is kept of a token: it has too many bits to be guessed from it."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def peer_asker(connected: socket.socket, own_uid: int) -> ApiCaller | None:
    """Who is at the other end of a unix socket, if that is this server's user or root."""
    data = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    _, uid, _ = _PEER.unpack(data)
    return ApiCaller(f"peer uid {uid}", (SCOPE_ADMIN,)) if uid in (0, own_uid) else None


def bearer_asker(authorization: str, tokens: Mapping[str, AdminToken], now_s: float) -> ApiCaller:
    """Who a token stands for. Raises `AccessDenied` (Unauthorized), the same for every reason."""
    token = _token_of(authorization)
    found = tokens.get(_token_id(token))
    kept = found.token_sha256 if found else _NO_TOKEN_SHA256
    is_right = hmac.compare_digest(token_sha256(token), kept)
    if found is None or not is_right or (found.expires_s is not None and now_s >= found.expires_s):
        raise unauthorized("the token is not known, or has expired")
    return ApiCaller(f"token {found.name} ({found.token_id})", found.scopes)


def bearer_refusal(authorization: str, tokens: Mapping[str, AdminToken], now_s: float) -> str:
    """Why `bearer_asker` refused, for the log: only the server's own people read it.

    A token is named only where its id is known; of others nothing is said.
    """
    found = tokens.get(_token_id(_token_of(authorization)))
    if found is None:
        return "the token is not known"
    named = f"token {clean(found.name)} ({found.token_id})"
    if found.expires_s is not None and now_s >= found.expires_s:
        return f"{named} has expired"
    return f"the secret of {named} is wrong"


def _token_of(authorization: str) -> str:
    return authorization.partition(" ")[2].strip()[:TOKEN_CHARS_MAX]


def _token_id(token: str) -> str:
    return token.removeprefix(TOKEN_PREFIX).partition("_")[0]


def signed_asker(
    head: RequestHead, root: RootCredentials, now_s: float, clock_skew_s: float
) -> tuple[ApiCaller, str]:
    """Who signed a request by SigV4, for this API, and the SHA-256 that its body must have.

    Only the root key may, in the Authorization header, with the body's hash. Raises `AccessDenied`
    (Unauthorized).
    """
    try:
        authenticated = authenticate(
            head,
            lambda access_key: root.secret_key if access_key == root.access_key else None,
            now_s,
            clock_skew_s,
            signing_keys=SigningKeys(service=SIGNING_SERVICE),
        )
    except ObjectCacheError as error:
        raise unauthorized(_why_not(error)) from error
    return ApiCaller(ROOT_USER, (SCOPE_ADMIN,)), _body_sha256(authenticated)


def _why_not(error: ObjectCacheError) -> str:
    if error.code == "InvalidAccessKeyId":
        return "the admin API takes signatures of the root key only; others use a token"
    return error.message


def _body_sha256(authenticated: Authenticated) -> str:
    if authenticated.presigned or authenticated.payload is not Payload.SIGNED:
        raise unauthorized("sign in the Authorization header, with the SHA-256 of the body")
    assert authenticated.payload_sha256 is not None
    return authenticated.payload_sha256


def check_body(body: bytes, sha256: str) -> None:
    """Raise `AccessDenied` (Unauthorized) unless the body is the one that was signed."""
    if not hmac.compare_digest(hashlib.sha256(body).hexdigest(), sha256):
        raise unauthorized("the body is not the one that was signed")


def unauthorized(message: str) -> AccessDenied:
    """The refusal of a request without good credentials."""
    return AccessDenied(message, code="Unauthorized")
