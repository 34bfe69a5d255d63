"""Which server the bench commands talk to, and as whom."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from objectcache.channel.authorities import ca_file_of, client_context
from objectcache.channel.credentials_file import read_credentials
from objectcache_schemas.errors import InvalidRequest

DEFAULT_ENDPOINT = "http://127.0.0.1:9000"


@dataclass(frozen=True, slots=True)
class StoreAccess:
    """An endpoint and the credentials for it."""

    endpoint: str
    access_key: str
    secret_key: str = field(repr=False)
    ca_file: str | None = None  # PEM, of an https endpoint; None is the system's authorities

    def tls(self) -> ssl.SSLContext | None:
        """For `Client(tls=...)`. Raises `InvalidRequest` where the file holds no authorities."""
        return client_context(self.ca_file)


def find_access(
    endpoint: str | None,
    credentials_file: Path | None,
    environment: Mapping[str, str],
    ca_file: Path | None = None,
) -> StoreAccess:
    """From the flags, else from OBJECTCACHE_ENDPOINT, _ACCESS_KEY, _SECRET_KEY and AWS_CA_BUNDLE.

    Raises `InvalidRequest` that says what to give where credentials are missing.
    """
    where = endpoint or environment.get("OBJECTCACHE_ENDPOINT") or DEFAULT_ENDPOINT
    authorities = str(ca_file) if ca_file is not None else ca_file_of(environment)
    if credentials_file is not None:
        return StoreAccess(where, *read_credentials(credentials_file), authorities)
    try:
        access_key = environment["OBJECTCACHE_ACCESS_KEY"]
        return StoreAccess(where, access_key, environment["OBJECTCACHE_SECRET_KEY"], authorities)
    except KeyError as error:
        raise InvalidRequest(
            f"{error.args[0]} is not set; set OBJECTCACHE_ACCESS_KEY and OBJECTCACHE_SECRET_KEY, "
            "or give --credentials-file DATA_DIR/root-credentials"
        ) from None
