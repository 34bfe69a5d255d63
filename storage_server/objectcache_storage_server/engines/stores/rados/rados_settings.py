"""Where a store in RADOS lies: `rados://POOL?conf=...&id=...&log_pool=...&namespace=...`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

from objectcache_schemas.errors import InvalidRequest

SCHEME = "rados"
NAMESPACE_DEFAULT = "objectcache"
_NAMESPACE = re.compile(r"[A-Za-z0-9_-]{1,64}")
_OPTIONS = {"conf": "conf", "id": "client", "log_pool": "log_pool", "namespace": "namespace"}


@dataclass(frozen=True, slots=True)
class RadosSettings:
    """A pool for objects, one for the log, and how the cluster is found."""

    pool: str
    log_pool: str = ""  # replicated; the same as `pool` where empty
    namespace: str = NAMESPACE_DEFAULT  # stores of one pool differ in this
    client: str = "admin"  # of `client.<id>`, as the keyring names it
    conf: str = ""  # path of ceph.conf; where Ceph looks for it by itself if empty

    def __post_init__(self) -> None:
        if not self.pool:
            raise InvalidRequest("a store in RADOS must name its pool: rados://POOL")
        if _NAMESPACE.fullmatch(self.namespace) is None:
            raise InvalidRequest(
                f"namespace must be 1 to 64 letters, digits, - and _, got {self.namespace!r}"
            )

    @staticmethod
    def from_url(url: str) -> RadosSettings:
        """Parse the URL of a store. Raises `InvalidRequest`."""
        parts = urlsplit(url)
        if parts.scheme != SCHEME or parts.path not in ("", "/") or parts.fragment:
            raise InvalidRequest(f"a store in RADOS is rados://POOL?option=value, got {url!r}")
        options = parse_qsl(parts.query, keep_blank_values=True)
        unknown = sorted({name for name, _ in options} - _OPTIONS.keys())
        if unknown:
            raise InvalidRequest(
                f"{url!r} has options {', '.join(unknown)}; there are {', '.join(_OPTIONS)}"
            )
        return RadosSettings(
            unquote(parts.netloc), **{_OPTIONS[name]: value for name, value in options}
        )
