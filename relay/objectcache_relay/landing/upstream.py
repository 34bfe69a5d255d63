"""Where deliveries come from: the SDK, under the job's access key. All calls may block."""

from __future__ import annotations

import logging
import math
import ssl
import time
from dataclasses import dataclass, replace

import numpy as np

from objectcache import Client
from objectcache.channel import requests
from objectcache.channel.access_key import SigningKey
from objectcache.channel.endpoint import Endpoint
from objectcache.channel.responses import parse_match
from objectcache.client import DEFAULT_REGION, TARGET_BYTES_MAX, TIMEOUT_S
from objectcache.core import ClientCore, CoreSettings, TransportChoice
from objectcache.deliveries.begun_fetch import BODY
from objectcache.deliveries.delivery import Delivery
from objectcache.deliveries.encoded.look_again import have_looked_at
from objectcache.deliveries.fetch_request import FetchRequest
from objectcache.deliveries.fetching import UNKNOWN_S, fetch
from objectcache.landing.memory_file import MemoryFile
from objectcache.landing.refusals import may_fall_back
from objectcache.landing.targets import PlainTarget, SessionTarget, Target
from objectcache.sessions.fabric_joining import FabricSettings
from objectcache_encodings.lossy import LossyDtype
from objectcache_relay.landing.landing_grants import DELIVERIES_MAX
from objectcache_relay.landing.landing_regions import LandingMemory, LandingRegion, region_bytes_for
from objectcache_relay.landing.landing_ring import LandingRing, LayerRing, WrittenRing
from objectcache_relay.landing.ring_fetch import fetch_into_ring, fetch_into_written_ring
from objectcache_schemas.delivery_paths import DeliveryPath
from objectcache_schemas.descriptor import Descriptor
from objectcache_schemas.errors import (
    AccessDenied,
    Busy,
    InvalidRequest,
    NotFound,
    ObjectCacheError,
    Unavailable,
)
from objectcache_schemas.layout import NUM_LAYERS_MAX

SMALL_REQUESTS_MAX = 32  # matches and layouts at a time, beside a connection for each delivery
ASKED_BUCKET = "objectcache-relay-asks"
ASK_S = 5.0
UNKNOWN_RING = "unknown field `ring_layers`"  # in the refusal of a server from before it
_FABRICS = ("nixl", "verbs")
_TRANSPORTS = ("shared_memory", "nixl", BODY)  # of `auto`, in this order

logger = logging.getLogger("objectcache.relay.upstream")


@dataclass(frozen=True, slots=True)
class AskedForward:
    """A get that an engine asks of the relay. `traceparent` is what the upstream's spans are
    children of; empty: it is not traced. `encodings` are those in which its chunks may land. Its
    lossy slices are to be those that `lossy` dequantises. With `ring_layers` it lands in a ring of
    that many layers' memory.
    """

    bucket: str
    descriptor: Descriptor
    path: DeliveryPath | None
    request_id: str
    traceparent: str = ""
    encodings: tuple[str, ...] = ()
    lossy: LossyDtype | None = None
    ring_layers: int = 0

    @property
    def payload_bytes(self) -> int:
        """Bytes of the payload where every chunk is stored."""
        return self.descriptor.payload_bytes(len(self.descriptor.chunk_keys))

    @property
    def layer_bytes(self) -> int:
        """Bytes of one of its layers, where every chunk is stored."""
        return self.payload_bytes // (self.descriptor.end_layer - self.descriptor.first_layer)

    @property
    def landing_bytes(self) -> int:
        """Bytes of the memory that it lands in."""
        return self.ring_layers * self.layer_bytes or self.payload_bytes

    @property
    def as_written(self) -> Descriptor:
        """The descriptor of what is written into the engine's target."""
        if self.lossy is None:
            return self.descriptor
        return replace(self.descriptor, per_layer_chunk_bytes=self.lossy.shape.slice_bytes)


class Upstream:
    """The store, as a client of its gateway sees it. Thread-safe."""

    def __init__(
        self,
        endpoint: str,
        key: SigningKey,
        fabric: FabricSettings,
        transport: str = "auto",
        tls: ssl.SSLContext | None = None,
        nic: str | None = None,
        nic_bytes_per_s: float | None = None,
        *,
        lands_in_files: bool = False,
        relayed_by: str = "",
    ) -> None:
        """`transport` is relay.transport, `tls` whom to trust at an https endpoint, `nic` this
        node's storage NIC. With `lands_in_files` all memory is such as other processes can map.
        `relayed_by` is who it says that it is.

        Raises `InvalidRequest` for an endpoint that is no URL, and for what is no NIC's name or
        rate.
        """
        self._transport = transport
        self._rings_unknown_until_s = -math.inf
        self._lands_in_files = lands_in_files
        settings = CoreSettings(
            DEFAULT_REGION,
            TransportChoice.AUTO,
            TIMEOUT_S,
            DELIVERIES_MAX + SMALL_REQUESTS_MAX,
            TARGET_BYTES_MAX,
            learn_windows=False,  # engines say what they know in their descriptors
            fabric=fabric,
            nic=nic,
            nic_bytes_per_s=nic_bytes_per_s,
            relayed_by=relayed_by,
        )
        self._core = ClientCore(Endpoint.parse(endpoint), lambda: key, settings, tls)
        self._client = Client.from_core(self._core)

    def memory(self, length_bytes: int) -> LandingMemory:
        """Memory that the store fills: shared where the storage server is on this host, else
        NIXL's, else any that bodies are received into. Raises what is in the way of the one that
        was set.
        """
        for transport in _TRANSPORTS if self._transport == "auto" else (self._transport,):
            try:
                return self._memory(transport, length_bytes)
            except ObjectCacheError:
                if transport == self._transport:
                    raise  # else another host, or it is not served
        raise AssertionError("a body is received anywhere")

    def _memory(self, transport: str, length_bytes: int) -> LandingMemory:
        if transport == "shared_memory":
            target = self._client.shared_memory_target(length_bytes)
            return LandingMemory(target, target.file)
        file = MemoryFile(length_bytes) if self._lands_in_files else None
        if transport in _FABRICS:
            return LandingMemory(self._fabric_target(transport, length_bytes, file), file)
        array = np.zeros(length_bytes, np.uint8) if file is None else file.array()
        return LandingMemory(PlainTarget(array), file)

    def _fabric_target(self, transport: str, length_bytes: int, file: MemoryFile | None) -> Target:
        if file is None:
            return self._client.fabric_target(length_bytes, transport=transport)
        return self._client.fabric_target(buffer=file.array(), transport=transport)

    def fetch(self, asked: AskedForward, region: LandingRegion) -> Delivery:
        """Begin a delivery into a region; returns when it is accepted. Raises the refusal.

        A part of a prefix is asked for as a prefix of its own: it lies in one piece here, and in
        rows at the engine. The storage NIC that it comes to is this node's, not the engine's. What
        an engine could decode is not asked for: whoever passes it on says what lands.
        """
        return fetch(self._core, self._request(asked, region.target))

    def fetch_into_ring(
        self, asked: AskedForward, region: LandingRegion
    ) -> tuple[Delivery, LayerRing]:
        """The same of a payload larger than the region. It comes in a body where the storage server
        does not write to the region, or is of a release that knows no ring.
        """
        first_layer = asked.descriptor.first_layer
        if isinstance(region.target, SessionTarget) and self._server_knows_rings():
            places = min(region.length_bytes // asked.layer_bytes, NUM_LAYERS_MAX)
            written_ring = WrittenRing(first_layer, places)
            request = self._request(asked, region.target, places)
            try:
                return fetch_into_written_ring(self._core, request, written_ring), written_ring
            except (Unavailable, NotFound) as error:
                if request.memory_choice is not TransportChoice.AUTO or not may_fall_back(error):
                    raise
            except InvalidRequest as error:
                if UNKNOWN_RING not in error.message:
                    raise
                self._rings_unknown_until_s = time.monotonic() + UNKNOWN_S
        ring = LandingRing(first_layer, region.length_bytes)
        request = replace(self._request(asked, None), transport=TransportChoice.BODY)
        return fetch_into_ring(self._core, request, region.target, ring), ring

    def _server_knows_rings(self) -> bool:
        """Whether it is worth asking for one."""
        return time.monotonic() >= self._rings_unknown_until_s

    def _request(
        self, asked: AskedForward, target: Target | None, ring_layers: int | None = None
    ) -> FetchRequest:
        return FetchRequest(
            asked.bucket,
            replace(
                asked.descriptor,
                rdma_target=None,
                part=None,
                encodings=asked.encodings or None,
                ring_layers=ring_layers,
                nic=self._core.settings.nic,
                nic_bytes_per_s=self._core.settings.nic_bytes_per_s,
            ),
            target,
            TransportChoice.AUTO,
            TIMEOUT_S,
            time.monotonic(),
            asked.path,
            asked.request_id,
            asked.traceparent or None,
            decodes=False,
        )

    def have_looked_at(self, asked: AskedForward, layer: int, key: str) -> None:
        """See `look_again`: of a get, of which a slice could not be decoded."""
        have_looked_at(self._core, self._request(asked, None), layer, key)

    def has_still(self, asked: AskedForward, chunk_count: int) -> bool:
        """Whether the job may read the first chunks of a get, all are stored, and none can have
        been replaced: their bucket has a KV layout, under which a key's bytes stay what they are.
        """
        keys = asked.descriptor.chunk_keys[:chunk_count]
        try:
            self.layout(asked.bucket)
            answer = self._core.channel.call(requests.match(asked.bucket, keys))
            return parse_match(bytes(answer.body), len(keys)) == chunk_count
        except ObjectCacheError as error:  # whoever asks for it all is told
            logger.debug("what has landed cannot be used again: %s", error)
            return False

    def match(self, bucket: str, chunk_keys: tuple[str, ...]) -> bytes:
        """The answer to a match. Raises the refusal."""
        return bytes(self._core.channel.call(requests.match(bucket, chunk_keys)).body)

    def layout(self, bucket: str) -> bytes:
        """A bucket's KV layout. Raises the refusal."""
        return bytes(self._core.channel.call(requests.get_layout(bucket)).body)

    def ask(self) -> None:
        """Ask what costs next to nothing, where deliveries can come in over the transport that was
        set. Raises the refusal: of a bucket that is not there, where the gateway takes the job's
        key; `Unavailable` where nothing can land.
        """
        in_the_way = self._landing_failure()
        try:
            self._ask_gateway()
        except Unavailable:
            raise
        except ObjectCacheError:
            if in_the_way is None:
                raise
        if in_the_way is not None:
            raise in_the_way

    def _ask_gateway(self) -> None:
        self._core.channel.call(requests.get_layout(ASKED_BUCKET), ASK_S)

    def _landing_failure(self) -> Unavailable | None:
        """Have a little memory made, and let it go; what is in the way of that. `auto` and bodies
        find some anywhere. Raises `AccessDenied`.
        """
        transport = self._transport
        if transport in ("auto", BODY):
            return None
        try:
            LandingRegion(self._memory(transport, region_bytes_for(1))).close()
        except Busy:
            return None  # it is used
        except AccessDenied:
            raise
        except ObjectCacheError as error:
            return Unavailable(
                f"relay.transport is {transport}, over which nothing can land: {error.message}"
            )
        return None

    def close(self) -> None:
        """End all connections and sessions."""
        self._client.close()

    def __repr__(self) -> str:
        return f"<Upstream {self._core!r}>"
