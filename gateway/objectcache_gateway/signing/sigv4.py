"""AWS Signature Version 4 for S3, the server's side.

Takes a request head and the time, and says who signed it or refuses it. S3 differs from other
services: the path is encoded once and never normalised, and the body's hash is a header. Source:
"Authenticating Requests (AWS Signature Version 4)" in the Amazon S3 API reference.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from objectcache_gateway.request.request_head import RequestHead, wire_bytes
from objectcache_gateway.signing.canonical_request import (
    canonical_headers,
    canonical_paths,
    canonical_query,
)
from objectcache_gateway.signing.signature_claim import (
    ALGORITHM,
    EMPTY_SHA256,
    S3_SERVICE,
    TERMINATOR,
    UNSIGNED_PAYLOAD,
    SignatureClaim,
    malformed_header,
    malformed_query,
    read_claim,
    unix_time,
)
from objectcache_schemas import headers
from objectcache_schemas.errors import AccessDenied, InvalidRequest, Unsupported

SIGNING_KEYS_MAX = 256  # one a key, day and region; far above what one gateway sees

NO_SUCH_KEY = "the access key does not exist"

# Signs for access keys that do not exist, so that they take the path of those that do.
_NOBODYS_SECRET = "0" * 40

# Unsigned, such a header could be added to what somebody else signed and change what it asks for.
_SIGNED_PREFIXES = ("x-amz-", headers.PREFIX)

_SHA256_HEX = re.compile(r"[0-9a-f]{64}")


class Payload(enum.Enum):
    """How the signature covers the body."""

    SIGNED = "a SHA-256 in hex"
    UNSIGNED = UNSIGNED_PAYLOAD
    STREAMING_SIGNED = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"
    STREAMING_SIGNED_TRAILER = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER"
    STREAMING_UNSIGNED_TRAILER = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"

    @property
    def is_aws_chunked(self) -> bool:
        """Whether the body comes in aws-chunked framing."""
        return self.name.startswith("STREAMING")


_PAYLOADS = {payload.value: payload for payload in Payload if payload is not Payload.SIGNED}
_CHUNK_SIGNED = (Payload.STREAMING_SIGNED, Payload.STREAMING_SIGNED_TRAILER)


@dataclass(frozen=True, slots=True)
class ChunkSigning:
    """What signs the chunks of a streaming upload; each signature covers the one before."""

    seed_signature: str  # of the request head
    signing_key: bytes = field(repr=False)
    amz_date: str
    scope: str

    def chunk_signature(self, previous: str, chunk_sha256: str) -> str:
        """Signature in hex of a chunk; `chunk_sha256` is in hex."""
        return self._sign("PAYLOAD", previous, f"{EMPTY_SHA256}\n{chunk_sha256}")

    def trailer_signature(self, previous: str, trailers_sha256: str) -> str:
        """Signature in hex of the trailers; the hash is that of their `name:value\\n` lines."""
        return self._sign("TRAILER", previous, trailers_sha256)

    def _sign(self, kind: str, previous: str, hashes: str) -> str:
        text = f"{ALGORITHM}-{kind}\n{self.amz_date}\n{self.scope}\n{previous}\n{hashes}"
        return _hmac(self.signing_key, text).hex()


@dataclass(frozen=True, slots=True)
class Authenticated:
    """Who signed a request, and what its body must be."""

    access_key: str
    payload: Payload
    payload_sha256: str | None  # hex; only with Payload.SIGNED
    chunk_signing: ChunkSigning | None  # only where chunks are signed
    presigned: bool


@dataclass(frozen=True, slots=True)
class FormerKey:
    """An access key that is not in force."""

    secret_key: str = field(repr=False)
    why: str  # in words, for whoever has the secret


class SigningKeys:
    """Derived signing keys, the least recently used forgotten first. Safe in several threads."""

    def __init__(self, keys_max: int = SIGNING_KEYS_MAX, service: str = S3_SERVICE) -> None:
        """`service` is whom they sign for: a signature for one opens no other."""
        self._keys_max = keys_max
        self.service = service
        self._keys: OrderedDict[tuple[str, str, str], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def signing_key(self, secret: str, day: str, region: str) -> bytes:
        """The key, derived where it is not known."""
        with self._lock:
            known = self._keys.get((secret, day, region))
        return known or derive_signing_key(secret, day, region, self.service)

    def keep(self, secret: str, day: str, region: str, key: bytes) -> None:
        """Remember a key that a valid signature was made with; others could fill the cache."""
        with self._lock:
            self._keys[secret, day, region] = key
            self._keys.move_to_end((secret, day, region))
            if len(self._keys) > self._keys_max:
                self._keys.popitem(last=False)

    def __repr__(self) -> str:
        return f"<SigningKeys {len(self._keys)}/{self._keys_max}>"


def authenticate(
    head: RequestHead,
    secret_for: Callable[[str], str | None],
    now_s: float,
    clock_skew_s: float,
    region: str | None = None,
    signing_keys: SigningKeys | None = None,
    former_key_for: Callable[[str], FormerKey | None] = lambda _: None,
) -> Authenticated:
    """Establish who signed the request.

    `now_s` is Unix time. `region` None takes any region of the credential scope. `signing_keys`
    saves deriving a key for every request, and says for which service. `former_key_for` knows keys
    that are not in force: whoever has the right secret is told why, and anybody else what is told
    of keys that never were, after the same computation. The host, every x-amz-* header and every
    x-objectcache-* header that is no mere label must be signed.

    Raises `AccessDenied` with S3's code, `InvalidRequest` for an authorization that cannot be read,
    and `Unsupported` for SigV4a.
    """
    keys = signing_keys or SigningKeys()
    claim = read_claim(head, keys.service)
    payload, payload_sha256 = payload_mode(claim.payload_hash)
    _check_signed_headers(head, claim)
    secret = secret_for(claim.access_key)
    if secret is None:
        raise _not_in_force(head, claim, former_key_for(claim.access_key))
    key = keys.signing_key(secret, claim.day, claim.region)
    valid = _is_signed_with(key, head, claim)
    _check_scope(claim, region)
    _check_time(claim, now_s, clock_skew_s)
    if not valid:
        raise AccessDenied(
            "the signature does not match; check the secret key, the signed headers and the path",
            code="SignatureDoesNotMatch",
        )
    keys.keep(secret, claim.day, claim.region, key)
    chunk_signing = None
    if payload in _CHUNK_SIGNED:
        chunk_signing = ChunkSigning(claim.signature, key, claim.amz_date, claim.scope)
    return Authenticated(claim.access_key, payload, payload_sha256, chunk_signing, claim.presigned)


def _not_in_force(
    head: RequestHead, claim: SignatureClaim, former: FormerKey | None
) -> AccessDenied:
    """The refusal of a key that is not in force, or never was."""
    secret = former.secret_key if former is not None else _NOBODYS_SECRET
    key = derive_signing_key(secret, claim.day, claim.region, claim.service)
    valid = _is_signed_with(key, head, claim)
    why = former.why if former is not None and valid else NO_SUCH_KEY
    return AccessDenied(why, code="InvalidAccessKeyId")


def derive_signing_key(secret: str, day: str, region: str, service: str = S3_SERVICE) -> bytes:
    """The 32-byte key that signs requests of one day, as yyyymmdd, in one region, to a service."""
    key = wire_bytes("AWS4" + secret)
    for text in (day, region, service, TERMINATOR):
        key = _hmac(key, text)
    return key


def _hmac(key: bytes, text: str) -> bytes:
    return hmac.digest(key, wire_bytes(text), "sha256")


def _is_signed_with(key: bytes, head: RequestHead, claim: SignatureClaim) -> bool:
    query = canonical_query(head.raw_query)
    headers = canonical_headers(head, claim.signed_headers)
    names = ";".join(claim.signed_headers)
    claimed = wire_bytes(claim.signature)
    for path in canonical_paths(head.raw_path):
        request = f"{head.method}\n{path}\n{query}\n{headers}\n{names}\n{claim.payload_hash}"
        digest = hashlib.sha256(wire_bytes(request)).hexdigest()
        text = f"{ALGORITHM}\n{claim.amz_date}\n{claim.scope}\n{digest}"
        if hmac.compare_digest(_hmac(key, text).hex().encode(), claimed):
            return True
    return False


def payload_mode(payload_hash: str) -> tuple[Payload, str | None]:
    """What an x-amz-content-sha256 says, and the hash where it is one.

    Raises `InvalidRequest` for what is neither, and `Unsupported` for SigV4a.
    """
    if _SHA256_HEX.fullmatch(payload_hash):
        return Payload.SIGNED, payload_hash
    if payload_hash in _PAYLOADS:
        return _PAYLOADS[payload_hash], None
    if payload_hash.startswith("STREAMING-AWS4-ECDSA"):
        raise Unsupported(f"SigV4a is not supported; sign with {ALGORITHM}")
    known = ", ".join(_PAYLOADS)
    raise InvalidRequest(f"x-amz-content-sha256 must be 64 lowercase hex digits or one of {known}")


def _check_signed_headers(head: RequestHead, claim: SignatureClaim) -> None:
    signed = frozenset(claim.signed_headers)
    to_sign = {name for name, _ in head.headers if name.startswith(_SIGNED_PREFIXES)}
    unsigned = to_sign - signed - headers.UNSIGNED_LABELS
    if "host" not in signed:
        unsigned.add("host")
    if unsigned:
        raise AccessDenied(
            f"these headers of the request must be signed: {', '.join(sorted(unsigned))}"
        )


def _check_scope(claim: SignatureClaim, region: str | None) -> None:
    malformed = malformed_query if claim.presigned else malformed_header
    if claim.day != claim.amz_date[:8]:
        raise malformed("the credential's day is not that of the request's date")
    if region is not None and claim.region != region:
        raise malformed(f"the credential's region must be {region}")


def _check_time(claim: SignatureClaim, now_s: float, clock_skew_s: float) -> None:
    signed_s = unix_time(claim.amz_date)
    if claim.expires_s is not None:
        if now_s > signed_s + claim.expires_s:
            raise AccessDenied("the presigned request has expired")
        if signed_s > now_s + clock_skew_s:
            raise AccessDenied("the presigned request is not valid yet")
    elif abs(now_s - signed_s) > clock_skew_s:
        raise AccessDenied(
            f"the request's date {claim.amz_date} differs by more than {clock_skew_s:g} s from "
            f"the server's {time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(now_s))}",
            code="RequestTimeTooSkewed",
        )
