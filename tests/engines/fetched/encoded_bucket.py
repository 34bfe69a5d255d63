"""A server that stores a connector's bucket encoded, and what a fetcher's workers make of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.encoded_delivery.prefixes import ZSTD, client_of, store_as
from tests.fetcher.fetchers import RunningFetcher
from tests.servers import RunningServer, start_server

NO_FETCHER = "http://127.0.0.1:9"  # nothing listens there
PATIENCE_S = 30.0  # for a fetcher that is silent: longer than one is on a busy machine


@contextmanager
def encoded_server(data_dir: Path, bucket: str, *settings: str) -> Iterator[RunningServer]:
    """A server whose bucket is stored as `--encoding planes-zstd` has it."""
    with start_server(data_dir, *settings) as running:
        with client_of(running) as client:
            client.create_bucket(bucket)
        store_as(running, bucket, ZSTD)
        yield running


class Decoded:
    """What a fetcher's workers write from now on."""

    def __init__(self, fetcher: RunningFetcher) -> None:
        self._fetcher = fetcher
        self._before = fetcher.decoded_bytes

    @property
    def decoded_bytes(self) -> dict[str, float]:
        """Bytes in engines' memory, by the encoding in which they came; those of which there are
        some.
        """
        now = self._fetcher.decoded_bytes
        more = {name: count - self._before.get(name, 0) for name, count in now.items()}
        return {name: count for name, count in more.items() if count}
