"""Chunks of LMCache's memory in a bucket: matched, stored and loaded in one request each."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from objectcache.client import Client
from objectcache.connectors.lmcache.geometry import ChunkGeometry
from objectcache.connectors.store.configuration import StoreConfiguration
from objectcache.connectors.store.lossy_setting import refuse_lossy
from objectcache.connectors.store.open_bucket import open_bucket
from objectcache.connectors.store.outage import Outage
from objectcache.connectors.store.route_hints import route_by
from objectcache.connectors.store.stored_chunks import match_prefix, put_absent
from objectcache.kv_bucket import KvBucket
from objectcache.payload import Bytes
from objectcache_schemas.compute_windows import WHOLE_S
from objectcache_schemas.errors import NotFound, ObjectCacheError
from objectcache_schemas.limits import GIB, Limits

REQUEST_BYTES_MAX = GIB  # staged at once in memory that client and server share, or load_bytes_max
LOAD_TIMEOUT_S_MAX = 8.0  # below LMCache's own blocking_timeout_secs, so that we learn of it first
CHUNKS_MAX = Limits().put_chunks_max
PROBE_KEY = "objectcache-probe"
ANY_GEOMETRY = ChunkGeometry(1, 1, 1, 1, "any")  # for what does not look at it

_LOG = logging.getLogger("objectcache.connectors.lmcache")

# Gives memory for `count` chunks from index `begin` on: a view each, or fewer where there is no
# room.
Landing = Callable[[int, int], Sequence[Bytes]]


class ChunkStore:
    """Blocking calls over one client. May be shared by threads.

    Chunks are views of LMCache's memory, `uint8[chunk_bytes]` each, in the order of their keys.
    Every call raises the classes of `objectcache.errors`: a lookup within `lookup_timeout_s` of the
    server's silence, others within `timeout_s`, and all at once while a store that failed is left
    alone.
    """

    def __init__(self, configuration: StoreConfiguration) -> None:
        """Raises `InvalidRequest` for a setting that cannot be had here."""
        refuse_lossy(configuration.lossy, "LMCache's chunks do not say where a head ends")
        self._client: Client = configuration.connect()
        # A client of their own, so that no lookup waits for a connection that a load holds.
        lookups = replace(configuration, timeout_s=configuration.lookup_timeout_s)
        self._lookup_client: Client = lookups.connect()
        self._lookup_bucket: KvBucket | None = None
        self._request_bytes_max = min(REQUEST_BYTES_MAX, configuration.load_bytes_max)
        self._load_timeout_s = min(configuration.timeout_s, LOAD_TIMEOUT_S_MAX)
        self._outage = Outage(_LOG)
        self._bucket_name = configuration.bucket
        self._lock = threading.Lock()
        self._buckets: dict[ChunkGeometry, KvBucket] = {}

    def match(self, keys: Sequence[str]) -> int:
        """How many leading chunks are stored, whatever their geometry."""
        return self._outage.call("a lookup", partial(self._match, keys))

    def match_or_none(self, keys: Sequence[str]) -> int:
        """As `match`; 0 where the store does not answer."""
        return self._outage.attempt("a lookup", partial(self._match, keys), 0)

    def probe(self) -> None:
        """Ask for a chunk that nobody stores, even of a store that is left alone; raises what
        stands in the way of real requests.
        """
        try:
            self._match([PROBE_KEY])
        except ObjectCacheError as error:
            self._outage.failed("a probe", error)
            raise
        self._outage.answered("a probe")

    def store(self, keys: Sequence[str], chunks: Sequence[Bytes], geometry: ChunkGeometry) -> int:
        """Store chunks; returns how many are new. A chunk that is stored already stays as it is.

        Computing KV again rarely gives the same bytes, so other bytes under a key are no error:
        both are the KV of the same tokens.
        """
        by_key = dict(zip(keys, chunks, strict=True))
        return self._outage.call("a put", partial(self._store, list(by_key), by_key, geometry))

    def load(
        self, keys: Sequence[str], geometry: ChunkGeometry, landing: Landing, relay: str = ""
    ) -> int:
        """Copy the longest stored run of keys into LMCache's memory; returns how many chunks.
        `relay` is the one over which a router would have them come.

        Rows are copied while the next ones arrive. A load that raises leaves the memory undefined.
        """
        return self._outage.call("a load", partial(self._load, keys, geometry, landing, relay))

    def _load(
        self, keys: Sequence[str], geometry: ChunkGeometry, landing: Landing, relay: str
    ) -> int:
        route = route_by(self._client, relay)
        loaded = 0
        for begin, end in self._batches(len(keys), geometry):
            loaded += self._load_batch(keys[begin:end], geometry, partial(landing, begin), route)
            if loaded < end:
                break
        return loaded

    def delete(self, key: str) -> None:
        """Delete a chunk; one that is not stored is a success."""
        self._outage.call("a delete", lambda: self._bucket(ANY_GEOMETRY).delete(key))

    def close(self) -> None:
        """Close the clients: calls that run now fail."""
        self._lookup_client.close()
        self._client.close()

    def _match(self, keys: Sequence[str]) -> int:
        bucket = self._lookup_bucket
        if bucket is None:
            bucket = open_bucket(self._lookup_client, self._bucket_name, ANY_GEOMETRY.layout)
            self._lookup_bucket = bucket
        return match_prefix(bucket, keys)

    def _store(
        self, keys: Sequence[str], chunks: Mapping[str, Bytes], geometry: ChunkGeometry
    ) -> int:
        return sum(
            self._store_batch(keys[begin:end], chunks, geometry)
            for begin, end in self._batches(len(keys), geometry)
        )

    def _store_batch(
        self, keys: Sequence[str], chunks: Mapping[str, Bytes], geometry: ChunkGeometry
    ) -> int:
        def put(begin: int, end: int, _: str | None) -> int:
            return self._put(keys[begin:end], chunks, geometry)

        return put_absent(self._bucket(geometry), keys, put)

    def _put(
        self, keys: Sequence[str], chunks: Mapping[str, Bytes], geometry: ChunkGeometry
    ) -> int:
        put = self._bucket(geometry).put_layers(keys)
        with put:
            for row in range(geometry.row_count):
                put.write_layer([geometry.row(chunks[key], row).data for key in keys])
        return put.result.stored if put.result else 0

    def _load_batch(
        self,
        keys: Sequence[str],
        geometry: ChunkGeometry,
        landing: Callable[[int], Sequence[Bytes]],
        route: str | None,
    ) -> int:
        bucket = self._bucket(geometry)
        try:
            delivery = bucket.fetch(
                keys,
                delivery="layerwise",
                on_missing="truncate",
                compute_window_s=WHOLE_S,
                timeout_s=self._load_timeout_s,
                route=route,
            )
        except NotFound as error:
            if error.code != "NoSuchKey":
                raise
            return 0
        with delivery:
            chunks = landing(delivery.chunk_count)
            if not chunks:
                return 0
            for row, slices in delivery:
                for chunk, stored in zip(chunks, slices, strict=False):
                    geometry.row(chunk, row)[:] = stored
            return len(chunks)

    def _bucket(self, geometry: ChunkGeometry) -> KvBucket:
        with self._lock:
            bucket = self._buckets.get(geometry)
        if bucket is None:
            bucket = open_bucket(self._client, self._bucket_name, geometry.layout)
            with self._lock:
                bucket = self._buckets.setdefault(geometry, bucket)
        return bucket

    def _batches(self, chunk_count: int, geometry: ChunkGeometry) -> Iterator[tuple[int, int]]:
        """Ranges [begin, end) of chunks, one a request."""
        size = max(1, min(CHUNKS_MAX, self._request_bytes_max // geometry.chunk_bytes))
        for begin in range(0, chunk_count, size):
            yield begin, min(chunk_count, begin + size)

    def __repr__(self) -> str:
        return f"<ChunkStore {self._bucket_name}, {self._client!r}>"
