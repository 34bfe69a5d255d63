"""The bucket that a connector keeps its KV in, opened when it is first needed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from logging import Logger

from objectcache.client import Client
from objectcache.connectors.store.configuration import StoreConfiguration
from objectcache.connectors.store.open_bucket import open_bucket
from objectcache.kv_bucket import KvBucket
from objectcache.landing.regions import Region
from objectcache.landing.target_pool import memory_file_region
from objectcache.landing.targets import SessionTarget
from objectcache_encodings.lossy import LossyDtype
from objectcache_schemas.errors import ObjectCacheError
from objectcache_schemas.layout import KvLayout

LOG_INTERVAL_S = 30.0


class Store:
    """A client and a bucket, for one role of a connector. Thread-safe.

    Made without asking the server, so that an engine starts without it.
    """

    def __init__(
        self,
        configuration: StoreConfiguration,
        layout: KvLayout,
        timeout_s: float,
        make_region: Callable[[int], Region] = memory_file_region,
        lossy: LossyDtype | None = None,
    ) -> None:
        """`timeout_s` bounds every silence of the server, in place of the configuration's.
        `make_region` is the client's. With `lossy` chunks are quantised.
        """
        self._name = configuration.bucket
        self._layout = layout
        self._lossy = lossy
        self._bucket: KvBucket | None = None
        self._configuration = configuration
        chosen = replace(configuration, timeout_s=timeout_s)
        self.client: Client = chosen.connect(make_region=make_region)

    @property
    def layout(self) -> KvLayout:
        """The shape of a chunk as the engine has it."""
        return self._layout

    def bucket(self) -> KvBucket:
        """The bucket, made where there is none.

        Raises the server's refusal: `Conflict` (KvLayoutConflict) where the bucket has a KV layout
        of another shape. A bucket for several models has none.
        """
        if (bucket := self._bucket) is None:
            bucket = self._bucket = open_bucket(self.client, self._name, self._layout, self._lossy)
        return bucket

    def staging_memory(self) -> Callable[[int], SessionTarget] | None:
        """What makes memory that the server reads puts out of, over the configured transport; None
        where puts go in bodies.
        """
        return self._configuration.put_memory(self.client)

    def close(self) -> None:
        """Close the client. Repeating has no effect."""
        self.client.close()


class Complaints:
    """Logs one kind of failure at most once per interval, with how many there were. Thread-safe."""

    def __init__(self, logger: Logger, what: str) -> None:
        """`what` begins the line: what failed, and what the engine does instead."""
        self._logger = logger
        self._what = what
        self._lock = threading.Lock()
        self._silent_until_s = 0.0
        self._unsaid = 0
        self.count = 0

    def add(self, error: BaseException) -> None:
        """Count a failure, and tell of it if none was told of lately."""
        now_s = time.monotonic()
        with self._lock:
            self.count += 1
            self._unsaid += 1
            if now_s < self._silent_until_s:
                return
            self._silent_until_s = now_s + LOG_INTERVAL_S
            unsaid, self._unsaid = self._unsaid, 0
        reason = error.message if isinstance(error, ObjectCacheError) else repr(error)
        self._logger.warning("%s (%d times): %s", self._what, unsaid, reason)

    def __repr__(self) -> str:
        return f"<Complaints {self.count}>"
