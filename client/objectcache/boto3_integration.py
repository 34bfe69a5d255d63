"""The extension as methods of ordinary boto3 clients.

    session = boto3.Session()
    register(session)
    s3 = session.client("s3", endpoint_url="http://127.0.0.1:9000")
    with s3.kv_get(Bucket="b", ChunkKeys=keys, KvLayout=layout)["Body"] as delivery:
        ...

Added through botocore's own extension point, the event `creating-client-class.s3`. The methods use
the client's endpoint, credentials, region and read timeout, take keyword arguments in boto3's
spelling, and raise the classes of `objectcache.errors`.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Sequence
from typing import Any, ClassVar, TypedDict

from objectcache.arguments import checked_keys
from objectcache.channel import requests
from objectcache.channel.access_key import SigningKey
from objectcache.channel.endpoint import Endpoint
from objectcache.channel.responses import parse_match
from objectcache.client import CONNECTIONS_MAX, TARGET_BYTES_MAX, Client
from objectcache.core import ClientCore, CoreSettings, TransportChoice
from objectcache.deliveries.begun_fetch import BODY
from objectcache.deliveries.delivery import Delivery
from objectcache.kv_bucket import KvBucket
from objectcache.landing.targets import Target
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.layout import KvLayout

_ATTRIBUTE = "_objectcache_core"
_LOCK = threading.Lock()


class KvMatchOutput(TypedDict):
    """Answer of `kv_match`."""

    Matched: int


class KvPutOutput(TypedDict):
    """Answer of `kv_put`."""

    Stored: int
    Existing: int


class KvLayoutOutput(TypedDict):
    """Answer of `get_kv_layout`."""

    KvLayout: KvLayout


class KvGetOutput(TypedDict):
    """Answer of `kv_get`. `Body` is the running delivery; close it."""

    Body: Delivery
    ChunkCount: int
    DeliveryMode: str
    Transport: str
    RequestId: str
    Path: str | None
    RateBytesPerSecond: int | None
    WindowSource: str | None


class KvMethods:
    """Base class that S3 clients get beside botocore's own."""

    _objectcache_tls: ClassVar[ssl.SSLContext | None] = None

    def get_kv_layout(self, *, Bucket: str) -> KvLayoutOutput:
        """A bucket's KV layout. Raises `NotFound` (NoSuchKvLayout)."""
        return {"KvLayout": self._objectcache().get_layout(Bucket)}

    def put_kv_layout(self, *, Bucket: str, KvLayout: KvLayout) -> None:
        """Give a bucket its KV layout. Raises `Conflict` where it has another."""
        self._objectcache().put_layout(Bucket, KvLayout)

    def kv_match(self, *, Bucket: str, ChunkKeys: Sequence[str]) -> KvMatchOutput:
        """How many leading chunks are stored."""
        keys = checked_keys(ChunkKeys)
        reply = core_of(self).channel.call(requests.match(Bucket, keys))
        return {"Matched": parse_match(reply.body, len(keys))}

    def kv_put(
        self,
        *,
        Bucket: str,
        ChunkKeys: Sequence[str],
        KvLayout: KvLayout,
        Body: Any,
        ParentKey: str | None = None,
    ) -> KvPutOutput:
        """Store chunks from the request's body, all or none; see `KvBucket.put`."""
        bucket = KvBucket(core_of(self), Bucket, KvLayout)
        result = bucket.put(ChunkKeys, Body, parent_key=ParentKey, transport=BODY)
        return {"Stored": result.stored, "Existing": result.existing}

    def kv_get(
        self,
        *,
        Bucket: str,
        ChunkKeys: Sequence[str],
        KvLayout: KvLayout,
        Delivery: str = "auto",
        Layers: tuple[int, int] | None = None,
        OnMissing: str = "fail",
        ComputeWindowSeconds: float | None = None,
        ContextTokens: int | None = None,
        Model: str | None = None,
        Fingerprint: str | None = None,
        ComputedTokens: int | None = None,
        RateBytesPerSecond: float | None = None,
        Path: str | None = None,
        Target: Target | None = None,
        Transport: str | None = None,
    ) -> KvGetOutput:
        """Begin to fetch a prefix; see `KvBucket.fetch`."""
        delivery = KvBucket(core_of(self), Bucket, KvLayout).fetch(
            ChunkKeys,
            delivery=Delivery,
            layers=Layers,
            on_missing=OnMissing,
            compute_window_s=ComputeWindowSeconds,
            context_tokens=ContextTokens,
            model=Model,
            fingerprint=Fingerprint,
            computed_tokens=ComputedTokens,
            rate_bytes_per_s=RateBytesPerSecond,
            path=Path,
            target=Target,
            transport=Transport,
        )
        return {
            "Body": delivery,
            "ChunkCount": delivery.chunk_count,
            "DeliveryMode": delivery.mode,
            "Transport": delivery.transport,
            "RequestId": delivery.request_id,
            "Path": delivery.path,
            "RateBytesPerSecond": delivery.rate_bytes_per_s,
            "WindowSource": delivery.window_source,
        }

    def _objectcache(self) -> Client:
        return Client.from_core(core_of(self))


def register(session: Any, *, tls: ssl.SSLContext | None = None) -> None:
    """Give S3 clients that `session` creates from now on the methods of `KvMethods`.

    `session` is a boto3.Session or a botocore session. `tls` replaces the system's certificates and
    rules for https endpoints.
    """
    methods = type("KvMethods", (KvMethods,), {"_objectcache_tls": tls})

    def add_methods(base_classes: list[type], **_event: Any) -> None:
        base_classes.insert(0, methods)

    events = getattr(session, "events", None) or session.get_component("event_emitter")
    events.register("creating-client-class.s3", add_methods, unique_id="objectcache-kv-methods")


def core_of(s3: Any) -> ClientCore:
    """The connections behind a boto3 client's KV methods: made at the first call, one for each
    client, closed with it.
    """
    with _LOCK:
        core: ClientCore | None = s3.__dict__.get(_ATTRIBUTE)
        if core is None:
            core = _new_core(s3)
            s3.__dict__[_ATTRIBUTE] = core
        return core


def _new_core(s3: Any) -> ClientCore:
    settings = CoreSettings(
        region=s3.meta.region_name or "us-east-1",
        transport=TransportChoice.AUTO,
        timeout_s=float(s3.meta.config.read_timeout),
        connections_max=CONNECTIONS_MAX,
        target_bytes_max=TARGET_BYTES_MAX,
    )
    # botocore keeps a client's credentials here and offers no other way to them.
    credentials = s3._get_credentials()

    def access_key() -> SigningKey:
        if credentials is None:
            raise InvalidRequest("the boto3 client has no credentials")
        frozen = credentials.get_frozen_credentials()
        return SigningKey(frozen.access_key, frozen.secret_key, frozen.token)

    return ClientCore(
        Endpoint.parse(s3.meta.endpoint_url), access_key, settings, s3._objectcache_tls
    )
