"""Whose certificates the client believes, for https endpoints."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path

from objectcache_schemas.errors import InvalidRequest

CA_FILE_VARIABLE = "AWS_CA_BUNDLE"  # as the AWS CLI and SDKs call it


def client_context(ca_file: str | Path | None) -> ssl.SSLContext | None:
    """A context that believes the authorities in the PEM file `ca_file`, and no others.

    None without a file: the system's authorities, or those of SSL_CERT_FILE. Raises
    `InvalidRequest` where the file holds none.
    """
    if not ca_file:
        return None
    try:
        return ssl.create_default_context(cafile=str(ca_file))
    except ssl.SSLError as error:
        raise InvalidRequest(f"CA file {ca_file}: holds no certificate in PEM") from error
    except OSError as error:
        raise InvalidRequest(f"CA file {ca_file}: {error.strerror}") from error


def ca_file_of(environment: Mapping[str, str]) -> str | None:
    """The file that AWS_CA_BUNDLE names, if it names one."""
    return environment.get(CA_FILE_VARIABLE) or None
