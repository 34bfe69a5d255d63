"""Where a store in S3 lies, and with which key it is asked."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import botocore.exceptions
import botocore.session

from objectcache_schemas.errors import InvalidRequest, Unavailable

DEFAULT_REGION = "us-east-1"
OPTIONS = ("endpoint", "region", "profile", "ca", "style")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(
    r"([A-Za-z0-9_-][A-Za-z0-9._-]{0,99}(/[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}){0,7})?"
)
ASK_AGAIN = timedelta(minutes=5)  # for credentials, which may be temporary or change


@dataclass(frozen=True, slots=True)
class S3Settings:
    """A bucket, and a prefix of its keys that the store has to itself.

    Without an endpoint it is AWS. Without a key of its own the store takes what botocore finds:
    the environment, `profile` of the shared files, the role of the machine.
    """

    bucket: str
    prefix: str = ""  # without a / at its ends
    endpoint: str = ""
    region: str = DEFAULT_REGION
    profile: str = ""
    ca_file: Path | None = None  # certificates that are trusted besides the system's
    is_virtual_hosted: bool = False  # the bucket is part of the host's name; always so on AWS
    access_key_id: str = ""
    secret_access_key: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if _BUCKET.fullmatch(self.bucket) is None:
            raise InvalidRequest(f"{self.bucket!r} is no name of a bucket")
        if _PREFIX.fullmatch(self.prefix) is None:
            raise InvalidRequest(
                f"the prefix of a store in S3 is up to 8 parts of letters, digits, . _ - between "
                f"slashes, got {self.prefix!r}"
            )
        found = urlsplit(self.endpoint)
        is_address = found.scheme in ("http", "https") and bool(found.netloc)
        if self.endpoint and (
            not is_address or found.path.strip("/") or found.query or "@" in found.netloc
        ):
            raise InvalidRequest("endpoint is http://HOST:PORT or https://HOST:PORT, and no more")
        if bool(self.access_key_id) != bool(self.secret_access_key):
            raise InvalidRequest("a key for S3 is an access key id and a secret access key")

    @staticmethod
    def from_address(
        address: str, access_key_id: str = "", secret_access_key: str = ""
    ) -> S3Settings:
        """Parse `s3://BUCKET/PREFIX?endpoint=...&region=...&profile=...&ca=...&style=...`. Raises
        `InvalidRequest`, which does not repeat the address: somebody may have put a secret in it.
        """
        parts = urlsplit(address)
        if "@" in parts.netloc:
            raise InvalidRequest(
                "a key for S3 is not part of the store's address: set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, or name a profile with ?profile="
            )
        if parts.scheme != "s3" or parts.fragment:
            raise InvalidRequest("a store in S3 is s3://BUCKET/PREFIX?option=value")
        given = parse_qsl(parts.query, keep_blank_values=True)
        options = dict(given)
        if unknown := sorted(options.keys() - set(OPTIONS)):
            raise InvalidRequest(
                f"a store in S3 has no option {', '.join(unknown)}; there are {', '.join(OPTIONS)}"
            )
        if len(options) < len(given):
            raise InvalidRequest("an option of a store in S3 is given twice")
        style = options.get("style", "")
        if style not in ("", "path", "virtual"):
            raise InvalidRequest(f"style is path or virtual, got {style!r}")
        return S3Settings(
            parts.netloc,
            unquote(parts.path).strip("/"),
            endpoint=options.get("endpoint", "").rstrip("/"),
            region=options.get("region", DEFAULT_REGION),
            profile=options.get("profile", ""),
            ca_file=Path(options["ca"]) if "ca" in options else None,
            is_virtual_hosted=style == "virtual",
            access_key_id=access_key_id,
            secret_access_key=secret_access_key,
        )

    def key(self, *parts: str) -> str:
        """A key of the store."""
        return "/".join((self.prefix, *parts) if self.prefix else parts)

    def where(self) -> str:
        """The store, for people."""
        path = f"{self.bucket}/{self.prefix}" if self.prefix else self.bucket
        return f"s3://{path} at {self.endpoint or 'AWS'}"


def obstore_options(settings: S3Settings) -> dict[str, Any]:
    """The arguments of obstore's `S3Store`. Raises `InvalidRequest` for what is not there."""
    client: dict[str, Any] = {"allow_http": settings.endpoint.startswith("http://")}
    if settings.ca_file is not None:
        try:
            client["root_certificate"] = settings.ca_file.read_bytes()
        except OSError as error:
            raise InvalidRequest(
                f"ca: {settings.ca_file} cannot be read: {error.strerror}"
            ) from error
    config: dict[str, Any] = {
        "region": settings.region,
        "virtual_hosted_style_request": settings.is_virtual_hosted or not settings.endpoint,
        "conditional_put": "etag",
    }
    if settings.endpoint:
        config["endpoint"] = settings.endpoint
    options: dict[str, Any] = {
        "config": config,
        "client_options": client,
        "retry_config": {"max_retries": 0},  # a deadline is a call's own: see `s3_calls`
    }
    if settings.access_key_id:
        config["access_key_id"] = settings.access_key_id
        config["secret_access_key"] = settings.secret_access_key
    else:
        options["credential_provider"] = _FoundCredentials(settings.profile)
    return options


class _FoundCredentials:
    """What botocore finds, for obstore, which asks again when it has grown old."""

    def __init__(self, profile: str) -> None:
        try:
            found = botocore.session.Session(profile=profile or None).get_credentials()
        except botocore.exceptions.BotoCoreError as error:
            raise InvalidRequest(f"profile: {error}") from error
        if found is None:
            raise InvalidRequest(
                "there are no credentials for S3: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                "or name a profile of ~/.aws"
            )
        self._credentials = found

    def __call__(self) -> dict[str, Any]:
        try:
            found = self._credentials.get_frozen_credentials()
        except botocore.exceptions.BotoCoreError as error:
            raise Unavailable(f"the credentials for S3 cannot be renewed: {error}") from error
        return {
            "access_key_id": found.access_key,
            "secret_access_key": found.secret_key,
            "token": found.token,
            "expires_at": datetime.now(UTC) + ASK_AGAIN,
        }
