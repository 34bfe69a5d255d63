"""What relays and fetchers keep of gets that have ended, while their engine's session goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from objectcache.landing.targets import SharedMemoryTarget
from tests.encoded_delivery.prefixes import (
    BUCKET,
    CHUNKS,
    DATA,
    KEYS,
    LAYOUT,
    PAYLOAD_BYTES,
    client_of,
    fill,
)
from tests.fetcher.fetchers import RunningFetcher
from tests.integration.served import wait_until
from tests.relay.relays import RunningRelay, landing_mapped_bytes
from tests.servers import RunningServer, start_server

BOUND_S = 60.0
LANDING_BYTES = 2 << 20  # one of the longest prefix at a time
WAIT = ("relay.wait_s=20", "fetcher.wait_s=20")
SETTINGS = (f"relay.landing_bytes={LANDING_BYTES}", "relay.hold_s=0", *WAIT)
CHUNK_COUNTS = (CHUNKS, 8, 4, 2, CHUNKS, 1)  # of several sizes in landing memory
ROUNDS = 15


@pytest.fixture(scope="module")
def encoded_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    data_dir = tmp_path_factory.mktemp("many")
    with start_server(data_dir, "storage.compaction_bytes_per_s=0") as running:
        with client_of(running) as client:
            fill(running, client)
        yield running


def pids_of(relay: RunningRelay) -> list[int]:
    own = psutil.Process(relay.process.pid)
    return [own.pid, *(one.pid for one in own.children())]


def check_bounded(relay: RunningRelay, target: SharedMemoryTarget) -> None:
    """Landing memory that is not used any more is gone from all processes."""
    pids = pids_of(relay)
    wait_until(
        lambda: max(landing_mapped_bytes(pid, target) for pid in pids) <= LANDING_BYTES * 1.1,
        f"{relay!r} maps its landing memory alone",
    )


@pytest.mark.parametrize("kind", [RunningRelay, RunningFetcher])
def test_gets_of_one_session_leave_nothing_behind_not_even_for_a_collector_of_cycles(
    kind: type[RunningRelay], encoded_server: RunningServer, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import gc\n\ngc.disable()\n")
    within = ("env", f"PYTHONPATH={tmp_path}")
    with (
        kind(encoded_server, tmp_path / "relay.log", *SETTINGS, within=within) as relay,
        relay.client("shared_memory") as client,
    ):
        bucket = client.kv_bucket(BUCKET, LAYOUT)
        target = client.shared_memory_target(PAYLOAD_BYTES)
        open_files: list[list[int]] = []
        for _ in range(ROUNDS):
            for count in CHUNK_COUNTS:
                with bucket.fetch(KEYS[:count], delivery="layerwise", target=target) as delivery:
                    payload = delivery.wait(BOUND_S)
                    assert np.array_equal(payload, DATA[:count].transpose(1, 0, 2))
                target.claim(BOUND_S).settle()
            check_bounded(relay, target)
            open_files.append([psutil.Process(pid).num_fds() for pid in pids_of(relay)])
        for after_one, after_all in zip(open_files[0], open_files[-1], strict=True):
            assert after_all < after_one + ROUNDS  # where one a get is kept, they are six a round


def test_targets_that_were_used_and_closed_are_unmapped_while_their_session_lives(
    encoded_server: RunningServer, tmp_path: Path
) -> None:
    with (
        RunningFetcher(encoded_server, tmp_path / "fetcher.log", *SETTINGS) as fetcher,
        fetcher.client("shared_memory") as client,
    ):
        bucket = client.kv_bucket(BUCKET, LAYOUT)
        kept = client.shared_memory_target(PAYLOAD_BYTES)  # so that the session goes on
        for _ in range(10):
            target = client.shared_memory_target(PAYLOAD_BYTES)
            with bucket.fetch(KEYS, delivery="layerwise", target=target) as delivery:
                assert np.array_equal(delivery.wait(BOUND_S), DATA.transpose(1, 0, 2))
            target.claim(BOUND_S).settle()
            target.close()
            check_bounded(fetcher, kept)
