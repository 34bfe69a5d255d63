"""The synchronous client."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from objectcache.arguments import (
    check_credential,
    check_layout,
    checked_encoding,
    checked_encodings,
    listed,
    nic_rate_of,
)
from objectcache.channel import requests
from objectcache.channel.access_key import SigningKey
from objectcache.channel.authorities import ca_file_of, client_context
from objectcache.channel.endpoint import Endpoint
from objectcache.core import ClientCore, CoreSettings, TransportChoice
from objectcache.kv_bucket import KvBucket
from objectcache.landing.regions import Region
from objectcache.landing.registered_memory import fabric_target, shared_memory_target
from objectcache.landing.target_pool import memory_file_region
from objectcache.landing.targets import FabricTarget, SharedMemoryTarget
from objectcache.routes.client_routes import ClientRoutes
from objectcache.routes.route_settings import (
    ROUTE_BYTES_MIN,
    checked_dispatch,
    checked_routes,
)
from objectcache.sessions.fabric_joining import FabricSettings
from objectcache_encodings.lossy import LossyDtype, lossy_layout
from objectcache_schemas.errors import Conflict, InvalidRequest, NotFound, Unavailable
from objectcache_schemas.layout import KvLayout

DEFAULT_REGION = "us-east-1"
TIMEOUT_S = 60.0
CONNECTIONS_MAX = 32
TARGET_BYTES_MAX = 4 << 30


class Client:
    """A client of one gateway. May be shared by threads; not by processes after a fork.

    `transport` is how deliveries reach this process, and puts leave it: shared_memory (the server
    must run on this host), body, or auto, which takes shared memory where it can be had; nixl or
    verbs have the server write into memory that is registered with a fabric, on this host or
    another (puts leave in bodies then).
    `timeout_s` bounds the connecting and every silence of the server, `connections_max` the open
    connections (an open delivery holds one), `target_bytes_max` the shared memory for deliveries
    and puts without a target of the caller's own. `learn_windows` measures how long the engine
    computes on a layer of a delivery in a body, and tells that to the server's scheduler at the
    next fetch of as many chunks for which the caller gives neither `compute_window_s` nor `model`.
    (Of deliveries into shared memory the server hears itself.) Layerwise deliveries of
    `split_from_bytes` or more into registered memory are shared by all storage servers that reach
    it; 0 is never. `nic` names the storage NIC of this host that deliveries come to, and
    `nic_bytes_per_s` what it carries: a storage server sends it no more, plans what goes to it by
    itself, and keeps nobody else waiting for it. All clients of one access key's owner that say the
    same name share it.

    `relays` are other nodes' relays, as `http://host:port` or `NODE=http://host:port`, under this
    access key too: with them deliveries may come over those nodes' storage NICs. `route` says which
    way: auto, direct, relay:NODE, or split over two; `node` is where this client runs. Where a
    relay refuses, dies, or brings nothing for `relay_timeout_s` (default: twice the time that was
    predicted, at least 0.5 s, and longer while no rate of it is known), the missing layers come
    directly, and whoever waits notices only the time. Deliveries under `route_bytes_min` go
    directly where the route is auto. With `dispatch`, the URL of the dispatch service, or those of
    its replicas in a list or with commas between them, its relays are used beside these, and where
    `worker` is this engine's name there, it chooses the route. `dispatch_token` is the file of its
    token, or a callable.

    Nothing is sent before the first call. Every call raises the classes of `objectcache.errors`.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        access_key: str,
        secret_key: str,
        session_token: str | None = None,
        region: str = DEFAULT_REGION,
        transport: str = "auto",
        timeout_s: float = TIMEOUT_S,
        connections_max: int = CONNECTIONS_MAX,
        target_bytes_max: int = TARGET_BYTES_MAX,
        learn_windows: bool = True,
        tls: ssl.SSLContext | None = None,
        fabric: FabricSettings | None = None,
        split_from_bytes: int = 0,
        relays: Sequence[str] = (),
        route: str = "auto",
        node: str = "",
        route_bytes_min: int = ROUTE_BYTES_MIN,
        relay_timeout_s: float | None = None,
        dispatch: str | Sequence[str] = "",
        dispatch_token: str | Path | Callable[[], str] | None = None,
        worker: str = "",
        nic: str | None = None,
        nic_bytes_per_s: float | None = None,
        encodings: Sequence[str] | None = (),
        put_encoding: str | None = "",
        fetcher: str = "",
        make_region: Callable[[int], Region] = memory_file_region,
    ) -> None:
        """`tls` replaces the system's certificates and rules for an https endpoint. `fabric` names
        this host's devices for the transports nixl and verbs. `make_region` makes the shared memory
        for deliveries without a target: `PageLockedMemory.region` has a GPU copy out of it.
        `encodings` (planes-zstd, planes-deflate) are those in which chunks may come as they are
        stored, where that is fewer bytes; they are decoded by whoever waits for a layer. "auto"
        asks for them where that has layers there sooner, by what past deliveries took.
        `put_encoding` is that in which puts send slices, encoded by whoever puts them, or auto,
        where that holds up puts for less time. `fetcher` is
        the URL of this host's fetcher, which takes deliveries in, and decodes them, on processors
        of its own: they come over it where `route` says nothing else, and without it where it
        cannot be reached, or dies.
        """
        check_credential("access_key", access_key)
        check_credential("secret_key", secret_key)
        if session_token is not None:
            check_credential("session_token", session_token)
        key = SigningKey(access_key, secret_key, session_token)
        choice = TransportChoice.parse(transport)
        settings = CoreSettings(
            region,
            choice,
            timeout_s,
            connections_max,
            target_bytes_max,
            learn_windows,
            FabricSettings() if fabric is None else fabric,
            split_from_bytes,
            nic,
            nic_bytes_per_s,
            checked_encodings(encodings),
            checked_encoding("put_encoding", put_encoding),
        )
        source = checked_dispatch(dispatch, dispatch_token, worker)
        chosen = checked_routes(
            relays, route, node, route_bytes_min, relay_timeout_s, source, fetcher
        )
        chosen.check_route()
        self._core = ClientCore(Endpoint.parse(endpoint), lambda: key, settings, tls, make_region)
        self._routes: ClientRoutes | None = None
        if chosen.has_relays:
            self._routes = ClientRoutes(chosen, settings, lambda: key, tls)

    @classmethod
    def from_environment(
        cls,
        environment: Mapping[str, str] | None = None,
        *,
        region: str = DEFAULT_REGION,
        transport: str = "auto",
        timeout_s: float = TIMEOUT_S,
    ) -> Client:
        """A client by OBJECTCACHE_ENDPOINT, OBJECTCACHE_ACCESS_KEY and OBJECTCACHE_SECRET_KEY.

        AWS_CA_BUNDLE may name the authorities of an https endpoint, OBJECTCACHE_NIC and
        OBJECTCACHE_NIC_BYTES_PER_S this host's storage NIC, OBJECTCACHE_RELAYS (with commas between
        them), OBJECTCACHE_ROUTE and OBJECTCACHE_NODE the routes of deliveries, OBJECTCACHE_FETCHER
        this host's fetcher. Raises `InvalidRequest` naming the variable that is not set, or is no
        rate.
        """
        values = os.environ if environment is None else environment
        return cls(
            _variable(values, "OBJECTCACHE_ENDPOINT"),
            access_key=_variable(values, "OBJECTCACHE_ACCESS_KEY"),
            secret_key=_variable(values, "OBJECTCACHE_SECRET_KEY"),
            region=region,
            transport=transport,
            timeout_s=timeout_s,
            tls=client_context(ca_file_of(values)),
            nic=values.get("OBJECTCACHE_NIC") or None,
            nic_bytes_per_s=nic_rate_of(values),
            relays=listed(values.get("OBJECTCACHE_RELAYS", "")),
            route=values.get("OBJECTCACHE_ROUTE") or "auto",
            node=values.get("OBJECTCACHE_NODE", ""),
            fetcher=values.get("OBJECTCACHE_FETCHER", ""),
        )

    @classmethod
    def from_core(cls, core: ClientCore) -> Client:
        """A client over a core that was made elsewhere."""
        client = cls.__new__(cls)
        client._core = core
        client._routes = None
        return client

    def create_bucket(self, name: str) -> None:
        """Create a bucket; one's own again is a success. Raises `Conflict` (BucketAlreadyExists)
        where it is another's.
        """
        self._core.channel.call(requests.create_bucket(name, self._core.settings.region))

    def delete_bucket(self, name: str) -> None:
        """Delete an empty bucket. Raises `NotFound`, or `Conflict` (BucketNotEmpty)."""
        self._core.channel.call(requests.delete_bucket(name))

    def put_layout(self, bucket: str, layout: KvLayout) -> None:
        """Give a bucket its KV layout; the same one again is a success.

        Raises `Conflict` (KvLayoutConflict) where it has another.
        """
        check_layout(layout)
        self._core.channel.call(requests.put_layout(bucket, layout))

    def get_layout(self, bucket: str) -> KvLayout:
        """A bucket's KV layout. Raises `NotFound`: NoSuchKvLayout, or NoSuchBucket."""
        return KvLayout.from_bytes(self._core.channel.call(requests.get_layout(bucket)).body)

    def kv_bucket(
        self,
        name: str,
        layout: KvLayout,
        *,
        create: bool = False,
        lossy: LossyDtype | None = None,
    ) -> KvBucket:
        """A bucket seen through `layout`.

        With `lossy` its chunks are of that dtype of it, under other keys and in fewer bytes, and
        what is fetched loses what docs/encodings.md says: slices are quantised before they are put,
        and dequantised when they are fetched. `layout` is the model's own then.

        With `create` the bucket and its layout are made where they are missing. Without, the bucket
        must exist; it may have no layout. Raises `Conflict` (KvLayoutConflict) where its layout is
        another.
        """
        check_layout(layout)
        if lossy is not None:
            layout = lossy_layout(layout, lossy.name, lossy.shape)
        if create:
            self._create_kv_bucket(name, layout)
        else:
            self._check_layout(name, layout)
        return KvBucket(self._core, name, layout, self._routes, lossy)

    def shared_memory_target(self, length_bytes: int) -> SharedMemoryTarget:
        """Shared memory to fetch into, and to put from without a copy, again and again.

        Raises `Unavailable` with the reason where the server cannot reach this host's memory,
        `AccessDenied` where it refuses this identity.
        """
        return shared_memory_target(self._core.shared, length_bytes)

    def stock_memory(self, lengths_bytes: Sequence[int]) -> int:
        """Make and register memory for deliveries of these lengths before the first asks for it;
        how many bytes there was room for within `target_bytes_max`.

        Raises `Unavailable` where deliveries do not come into registered memory, and makes none.
        """
        choice = self._core.settings.transport
        if choice is TransportChoice.BODY:
            raise Unavailable("deliveries come in bodies")
        return self._core.memory(choice).stock(lengths_bytes)

    def fabric_target(
        self, length_bytes: int | None = None, *, buffer: Any = None, transport: str | None = None
    ) -> FabricTarget:
        """Memory that the server writes into over a fabric, to fetch into again and again.

        `transport` is nixl or verbs; without it the client's own, or else nixl. Either as many
        bytes of our own, or `buffer`, which is registered as it is: a writable C-contiguous buffer,
        or an array or tensor of a GPU (with `__cuda_array_interface__`; not run on a GPU), whose
        bytes `array` does not show. Raises `InvalidRequest` for another object, `AccessDenied`
        where the server refuses this identity, or NIXL to it, and `Unavailable` with the reason
        where it cannot reach the memory.
        """
        return fabric_target(self._core.fabric_memory(transport), length_bytes, buffer)

    def route_over(self, relay: str) -> str | None:
        """The route over a relay that somebody else names, by its node, address or URL: None where
        it is none of this client's, or is left alone because it failed, so that the client's own
        choice is better.
        """
        return None if self._routes is None else self._routes.route_over(relay)

    def route_counts(self) -> dict[tuple[str, str], int]:
        """How many deliveries took each route (direct, relay:NODE, split) for each reason, and how
        often a relay `failed`, `refused` or `was busy`, so that another route was taken. Empty for
        a client without relays.
        """
        return {} if self._routes is None else self._routes.counts()

    def close(self) -> None:
        """Close connections and the session; open deliveries fail. Arrays stay valid.

        Repeating has no effect. A client that is no longer used closes itself.
        """
        if self._routes is not None:
            self._routes.close()
        self._core.close()

    def _create_kv_bucket(self, name: str, layout: KvLayout) -> None:
        try:
            self.create_bucket(name)
        except Conflict as error:
            if error.code != "BucketAlreadyOwnedByYou":
                raise
        self.put_layout(name, layout)

    def _check_layout(self, name: str, layout: KvLayout) -> None:
        try:
            stored = self.get_layout(name)
        except NotFound as error:
            if error.code != "NoSuchKvLayout":
                raise
            return
        for field in layout.__struct_fields__:
            mine, its = getattr(layout, field), getattr(stored, field)
            if mine != its:
                raise Conflict(
                    f"bucket {name}: {field} is {mine!r} here and {its!r} in its KV layout",
                    code="KvLayoutConflict",
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Client {self._core!r}>"


def _variable(environment: Mapping[str, str], name: str) -> str:
    value = environment.get(name)
    if not value:
        raise InvalidRequest(f"environment variable {name} is not set")
    return value
