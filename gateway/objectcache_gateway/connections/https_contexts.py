"""HTTPS: the contexts of the S3 port and of the admin API."""

from __future__ import annotations

from objectcache_runtime.networking.tls import ReloadingContext, certificate_files, https_context
from objectcache_schemas.errors import InvalidRequest


def server_context(certificate: str, key: str, section: str = "gateway") -> ReloadingContext | None:
    """The context of `section`.tls_certificate and .tls_key; None where neither is set: plain HTTP.

    The caller runs `objectcache_runtime.networking.tls.keep_reloading` beside the server. Raises
    `InvalidRequest` where the files make no valid pair.
    """
    if not certificate:
        if key:
            raise InvalidRequest(f"{section}.tls_key is set, {section}.tls_certificate is not")
        return None
    return https_context(certificate_files(section, certificate, key))
