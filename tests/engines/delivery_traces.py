"""What a server's traces say of the deliveries of an engine."""

from __future__ import annotations

from collections.abc import Callable

from objectcache_schemas.operators.traces import DeliveryTrace, GetTraces, Traces
from tests.integration.served import wait_until
from tests.servers import RunningServer
from tests.storage_client import StorageClient

TRACES_MAX = 1000


class NewTraces:
    """The traces of deliveries out of one bucket that began after this was made."""

    def __init__(self, server: RunningServer, bucket: str) -> None:
        self._socket = server.run_dir / "storage.sock"
        self._bucket = bucket
        self._before = {trace.request_id for trace in self._read()}

    def all_ended(self, count: int) -> list[DeliveryTrace]:
        """So many, in the order in which they began, once they have ended."""
        return self._all(count, lambda trace: trace.duration_s is not None)

    def all_consumed(self, count: int) -> list[DeliveryTrace]:
        """So many, in the order in which they began, once they have ended and the engine has told
        what it computed on all of their layers.
        """
        return self._all(count, _is_consumed)

    def _all(self, count: int, is_so: Callable[[DeliveryTrace], bool]) -> list[DeliveryTrace]:
        found: list[DeliveryTrace] = []

        def are_so() -> bool:
            found[:] = self._fresh()
            return len(found) >= count and all(map(is_so, found))

        wait_until(are_so, f"{count} traces of deliveries")
        assert len(found) == count
        return found

    def _fresh(self) -> list[DeliveryTrace]:
        fresh = [trace for trace in self._read() if trace.request_id not in self._before]
        return sorted(fresh, key=lambda trace: trace.started_unix_s)

    def _read(self) -> list[DeliveryTrace]:
        with StorageClient(self._socket) as storage:
            told = storage.ask(GetTraces(limit=TRACES_MAX), Traces)
        return [trace for trace in told.traces if trace.bucket == self._bucket]


def _is_consumed(trace: DeliveryTrace) -> bool:
    consumed = [layer.consumed_s is not None for layer in trace.layers]
    return trace.duration_s is not None and bool(consumed) and all(consumed)
