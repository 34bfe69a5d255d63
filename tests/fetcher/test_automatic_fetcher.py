"""`fetcher.encodings=auto`: chunks come as they are stored once that is known to pay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from objectcache import Client
from tests.encoded_delivery.prefixes import (
    BUCKET,
    DATA,
    KEYS,
    LAYOUT,
    ZSTD,
    client_of,
    fill,
)
from tests.fetcher.fetchers import RunningFetcher
from tests.fetcher.test_fetched_encodings import check
from tests.servers import RunningServer, start_server

# Decoding is hundreds of times as fast, so that it is faster on a busy machine, too.
SLOW_LINK = ("relay.nic=slow", f"relay.nic_bytes_per_s={1 << 20}")
SETTINGS = ("fetcher.encodings=auto", "relay.hold_s=0", *SLOW_LINK)
# A machine that stands still for half a second makes a link look fast, or encoded gets slow.
ATTEMPTS = 5


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with start_server(tmp_path_factory.mktemp("automatic")) as running:
        with client_of(running) as client:
            fill(running, client)
        yield running


def comes_encoded(fetcher: RunningFetcher, client: Client) -> bool:
    """Take the prefix, every byte of which is compared; whether workers had something to decode."""
    before = fetcher.decoded_bytes.get(ZSTD, 0)
    check(client)
    return fetcher.decoded_bytes.get(ZSTD, 0) > before


@pytest.mark.parametrize("landing_bytes", [64 << 20, 1 << 20], ids=["at once", "through a ring"])
def test_a_slow_link_is_measured_by_a_plain_get_and_the_next_comes_encoded(
    server: RunningServer, tmp_path: Path, landing_bytes: int
) -> None:
    assert (DATA.nbytes > landing_bytes) == (landing_bytes == 1 << 20)
    settings = (*SETTINGS, f"relay.landing_bytes={landing_bytes}")
    for attempt in range(ATTEMPTS):
        with (
            RunningFetcher(server, tmp_path / f"fetcher-{attempt}.log", *settings) as fetcher,
            fetcher.client("shared_memory") as client,
        ):
            first, *others = (comes_encoded(fetcher, client) for _ in range(3))
        assert not first
        if all(others):
            return
    pytest.fail("no fetcher found that it pays")


def test_gets_that_say_nothing_of_the_link_teach_nothing(
    server: RunningServer, tmp_path: Path
) -> None:
    with (
        RunningFetcher(server, tmp_path / "fetcher.log", *SETTINGS) as fetcher,
        fetcher.client("shared_memory") as client,
    ):
        bucket = client.kv_bucket(BUCKET, LAYOUT)
        for rate in (None, 1 << 18):
            layers = (2, 3) if rate is None else (0, 2)
            with bucket.fetch(
                KEYS, delivery="layerwise", layers=layers, rate_bytes_per_s=rate
            ) as delivery:
                delivery.wait(60.0)
        with bucket.fetch(KEYS, delivery="chunkwise") as delivery:
            delivery.wait(60.0)
        assert not comes_encoded(fetcher, client)
