"""What a request says about its own signature, read from its head before anything is believed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache

from objectcache_gateway.request.request_head import RequestHead
from objectcache_schemas.errors import AccessDenied, InvalidRequest, Unsupported

ALGORITHM = "AWS4-HMAC-SHA256"
S3_SERVICE, TERMINATOR = "s3", "aws4_request"
EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()
UNSIGNED_PAYLOAD = "UNSIGNED-PAYLOAD"
EXPIRES_S_MAX = 604_800  # S3's own limit on a presigned URL, seven days

_QUERY_MARKS = frozenset({"X-Amz-Algorithm", "X-Amz-Credential", "X-Amz-Signature"})
_V2_QUERY_MARKS = frozenset({"AWSAccessKeyId", "Signature"})
_AMZ_DATE = re.compile(r"([0-9]{4})([0-9]{2})([0-9]{2})T([0-9]{2})([0-9]{2})([0-9]{2})Z")
# As most clients write it; other orders and spaces are taken apart by _HEADER_FIELD.
_USUAL_FIELDS = re.compile(
    rf"{ALGORITHM} Credential=([^,\s]+), ?SignedHeaders=([^,\s]+), ?Signature=([^,\s]+)"
)
_HEADER_FIELD = re.compile(r"(?:^|[,\s])(Credential|SignedHeaders|Signature)=")


@dataclass(frozen=True, slots=True)
class SignatureClaim:
    """What a request says about its own signature; nothing of it has been checked."""

    access_key: str
    day: str  # of the credential, yyyymmdd
    region: str
    service: str
    signed_headers: tuple[str, ...]  # lowercase, in the order they were signed
    signature: str
    amz_date: str  # yyyymmddThhmmssZ
    payload_hash: str  # in hex, or the name of a payload mode
    expires_s: int | None  # only presigned

    @property
    def scope(self) -> str:
        """The credential scope of the string to sign."""
        return f"{self.day}/{self.region}/{self.service}/{TERMINATOR}"

    @property
    def presigned(self) -> bool:
        """Whether the signature is in the query."""
        return self.expires_s is not None


def read_claim(head: RequestHead, service: str = S3_SERVICE) -> SignatureClaim:
    """Read the Authorization header or the presigned query of a request to `service`.

    Raises `AccessDenied` for an anonymous request, one without a date or one with a session token,
    `InvalidRequest` for what cannot be read, and `Unsupported` for SigV4a.
    """
    authorization = head.header("authorization")
    query_names = {name for name, _ in head.query} if head.raw_query else frozenset[str]()
    in_query = not _QUERY_MARKS.isdisjoint(query_names)
    v2_in_query = query_names >= _V2_QUERY_MARKS
    if authorization is not None and (in_query or v2_in_query):
        raise InvalidRequest(
            "sign the request in the Authorization header or in the query, not in both"
        )
    if v2_in_query:
        raise _unsupported_mechanism("Signature Version 2")
    if in_query:
        return _query_claim(head, service)
    if authorization is not None:
        return _header_claim(head, authorization, service)
    raise AccessDenied("the request is not signed, and anonymous access is not allowed")


# --- the Authorization header --------------------------------------------------------------------


def _header_claim(head: RequestHead, authorization: str, service: str) -> SignatureClaim:
    _refuse_session_token(head.header("x-amz-security-token"))
    fields = _authorization_fields(authorization)
    access_key, day, region = _credential(fields["Credential"], service, malformed_header)
    payload_hash = head.header("x-amz-content-sha256")
    if payload_hash is None and service != S3_SERVICE:
        payload_hash = EMPTY_SHA256  # S3 alone asks for the header: others' signers leave it out
    if payload_hash is None:
        raise InvalidRequest("the header x-amz-content-sha256 is missing", code="InvalidRequest")
    return SignatureClaim(
        access_key,
        day,
        region,
        service,
        tuple(fields["SignedHeaders"].lower().split(";")),
        fields["Signature"],
        _amz_date_of(head),
        payload_hash,
        None,
    )


def _authorization_fields(authorization: str) -> dict[str, str]:
    usual = _USUAL_FIELDS.fullmatch(authorization)
    if usual is not None:
        credential, signed_headers, signature = usual.groups()
        return {
            "Credential": credential,
            "SignedHeaders": signed_headers,
            "Signature": signature,
        }
    scheme, _, rest = authorization.strip().partition(" ")
    if scheme != ALGORITHM:
        raise _wrong_scheme(scheme, rest)
    # [before, name, value, name, value, ...]
    parts = _HEADER_FIELD.split(rest)
    names, values = parts[1::2], [value.strip(", \t") for value in parts[2::2]]
    if sorted(names) != ["Credential", "Signature", "SignedHeaders"]:
        raise malformed_header("it needs Credential, SignedHeaders and Signature, each once")
    return dict(zip(names, values, strict=True))


def _wrong_scheme(scheme: str, rest: str) -> InvalidRequest | AccessDenied | Unsupported:
    if not scheme:
        return AccessDenied("the Authorization header is empty")
    if scheme == "AWS" and ":" in rest:
        return _unsupported_mechanism("Signature Version 2")
    if scheme == "AWS4-ECDSA-P256-SHA256":
        return Unsupported(f"SigV4a is not supported; sign with {ALGORITHM}")
    return InvalidRequest(f"the Authorization header must begin with {ALGORITHM}")


def _amz_date_of(head: RequestHead) -> str:
    """The request's time as yyyymmddThhmmssZ, from x-amz-date or else Date."""
    for name in ("x-amz-date", "date"):
        text = head.header(name)
        if text is not None:
            date = _amz_date(text.strip())
            if date is None:
                raise AccessDenied(f"the header {name} must be a date such as 20130524T000000Z")
            return date
    raise AccessDenied("the request needs an x-amz-date or Date header")


def _amz_date(text: str) -> str | None:
    if _AMZ_DATE.fullmatch(text):
        return text
    try:
        date = parsedate_to_datetime(text)
        date = date.astimezone(UTC) if date.tzinfo else date
    except (ValueError, IndexError, TypeError, OverflowError):
        return None
    return f"{date.year:04}{date:%m%dT%H%M%SZ}"


def malformed_header(what: str) -> InvalidRequest:
    """The refusal of an Authorization header."""
    return InvalidRequest(
        f"the Authorization header is malformed: {what}", code="AuthorizationHeaderMalformed"
    )


# --- the presigned query -------------------------------------------------------------------------


def _query_claim(head: RequestHead, service: str) -> SignatureClaim:
    values = _unique_query(head)
    _refuse_session_token(values.get("X-Amz-Security-Token") or head.header("x-amz-security-token"))
    if _needed(values, "X-Amz-Algorithm") != ALGORITHM:
        raise malformed_query(f"X-Amz-Algorithm must be {ALGORITHM}")
    access_key, day, region = _credential(
        _needed(values, "X-Amz-Credential"), service, malformed_query
    )
    amz_date = _needed(values, "X-Amz-Date")
    if not _AMZ_DATE.fullmatch(amz_date):
        raise malformed_query("X-Amz-Date must be a date such as 20130524T000000Z")
    payload_hash = head.header("x-amz-content-sha256") or values.get("X-Amz-Content-Sha256")
    return SignatureClaim(
        access_key,
        day,
        region,
        service,
        tuple(_needed(values, "X-Amz-SignedHeaders").lower().split(";")),
        _needed(values, "X-Amz-Signature"),
        amz_date,
        payload_hash or UNSIGNED_PAYLOAD,
        _expires_s(_needed(values, "X-Amz-Expires")),
    )


def _unique_query(head: RequestHead) -> dict[str, str]:
    values = {name: value for name, value in head.query if name.startswith("X-Amz-")}
    if len(values) != sum(name.startswith("X-Amz-") for name, _ in head.query):
        raise malformed_query("an X-Amz- parameter is given twice")
    return values


def _needed(values: dict[str, str], name: str) -> str:
    if name not in values:
        raise malformed_query(f"{name} is missing")
    return values[name]


def _expires_s(text: str) -> int:
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise malformed_query("X-Amz-Expires must be a number of seconds")
    if not 1 <= int(text) <= EXPIRES_S_MAX:
        # Ceph's tests of S3 want the status of a request that has expired, as radosgw answers.
        raise AccessDenied(f"X-Amz-Expires must be 1 to {EXPIRES_S_MAX} seconds")
    return int(text)


def malformed_query(what: str) -> InvalidRequest:
    """The refusal of a presigned query."""
    return InvalidRequest(
        f"the presigned query is malformed: {what}", code="AuthorizationQueryParametersError"
    )


# --- both ----------------------------------------------------------------------------------------


def _credential(
    text: str, service: str, malformed: Callable[[str], InvalidRequest]
) -> tuple[str, str, str]:
    """Access key, day and region of a credential for `service`."""
    parts = text.rsplit("/", 4)
    if len(parts) != 5 or not all(parts[:3]):
        raise malformed(f"the credential must be ACCESS-KEY/YYYYMMDD/REGION/{service}/{TERMINATOR}")
    access_key, day, region, *end = parts
    if end != [service, TERMINATOR]:
        raise malformed(f"the credential must end with /{service}/{TERMINATOR}")
    return access_key, day, region


@lru_cache(maxsize=64)
def unix_time(amz_date: str) -> float:
    """Unix time of a date such as 20130524T000000Z; raises `AccessDenied` for an impossible day."""
    match = _AMZ_DATE.fullmatch(amz_date)
    assert match is not None
    year, month, day, hour, minute, second = map(int, match.groups())
    try:
        return datetime(year, month, day, hour, minute, second, tzinfo=UTC).timestamp()
    except ValueError as error:
        raise AccessDenied(f"the request's date {amz_date} does not exist") from error


def _refuse_session_token(token: str | None) -> None:
    if token is not None:
        raise AccessDenied(
            "temporary credentials are not supported; sign without a session token",
            code="InvalidToken",
        )


def _unsupported_mechanism(mechanism: str) -> InvalidRequest:
    return InvalidRequest(
        f"{mechanism} is not supported; sign with {ALGORITHM}", code="InvalidRequest"
    )
