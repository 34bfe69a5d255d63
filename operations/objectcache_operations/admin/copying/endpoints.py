"""The two gateways between which a copy goes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from objectcache.channel.access_key import SigningKey
from objectcache.channel.authorities import ca_file_of, client_context
from objectcache.channel.credentials_file import read_credentials
from objectcache.channel.endpoint import Endpoint
from objectcache.channel.http_channel import HttpChannel
from objectcache.client import DEFAULT_REGION, TIMEOUT_S, Client
from objectcache.core import ClientCore, CoreSettings, TransportChoice
from objectcache_schemas.errors import InvalidRequest

CONNECTIONS_MAX = 4
TARGET_BYTES_MAX = 1 << 20  # bodies need none
VARIABLES = ("OBJECTCACHE_ACCESS_KEY", "OBJECTCACHE_SECRET_KEY")


@dataclass(frozen=True, slots=True)
class Side:
    """A gateway as one of the SDK's clients, and the channel for what the SDK does not ask."""

    client: Client
    channel: HttpChannel


def open_side(url: str, credentials: Path | None, ca_file: str | None) -> Side:
    """Reach a gateway by the key pair of a credentials file, or of the environment.

    Raises `InvalidRequest` that says what is missing.
    """
    key = SigningKey(*(_of_environment() if credentials is None else read_credentials(credentials)))
    settings = CoreSettings(
        DEFAULT_REGION, TransportChoice.BODY, TIMEOUT_S, CONNECTIONS_MAX, TARGET_BYTES_MAX
    )
    tls = client_context(ca_file or ca_file_of(os.environ))
    core = ClientCore(Endpoint.parse(url), lambda: key, settings, tls)
    return Side(Client.from_core(core), core.channel)


def _of_environment() -> tuple[str, str]:
    access_key, secret_key = (os.environ.get(name, "") for name in VARIABLES)
    if not access_key or not secret_key:
        raise InvalidRequest(
            f"no key pair for the S3 port: give --credentials and --to-credentials, "
            f"or set {' and '.join(VARIABLES)}"
        )
    return access_key, secret_key
