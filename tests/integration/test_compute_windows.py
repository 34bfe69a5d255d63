"""Where a delivery's compute window comes from, as its client is told by real servers."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from objectcache import Client, KvLayout, NotFound
from objectcache.deliveries.delivery import Delivery
from objectcache.kv_bucket import KvBucket
from tests.integration.served import wait_until
from tests.servers import RunningServer, running_server
from tests.unit.storage_server.scheduling.windows.test_compute_profiles import TABLE_A8

LAYERS, CHUNK_TOKENS, CHUNKS = 12, 64, 32
CONTEXT_TOKENS = 2 * CHUNK_TOKENS * CHUNKS  # half of it is cached
WINDOW_S = 0.00579  # that table A8 has for such a request


def layout(fingerprint: str) -> KvLayout:
    return KvLayout(
        num_layers=LAYERS,
        chunk_tokens=CHUNK_TOKENS,
        per_layer_chunk_bytes=512,
        dtype="uint8",
        fingerprint=fingerprint,
    )


@pytest.fixture(scope="module")
def windows_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose scheduler.profiles_dir holds table A8 as `llama`."""
    folder = tmp_path_factory.mktemp("windows")
    profiles = folder / "measured"
    profiles.mkdir()
    (profiles / "llama.csv").write_text(TABLE_A8)
    with running_server(folder / "data", f"scheduler.profiles_dir={profiles}") as server:
        yield server


@pytest.fixture(params=["shared_memory", "body"])
def client(windows_server: RunningServer, request: pytest.FixtureRequest) -> Iterator[Client]:
    keys = windows_server.credentials
    with Client(
        windows_server.endpoint,
        access_key=keys.access_key,
        secret_key=keys.secret_key,
        transport=request.param,
        learn_windows=False,  # what the server says counts here
    ) as client:
        yield client


def filled(client: Client, fingerprint: str = "none") -> tuple[KvBucket, list[str]]:
    """A bucket of the test's own with a prefix in it."""
    name = f"windows-{secrets.token_hex(6)}"
    bucket = client.kv_bucket(name, layout(fingerprint), create=True)
    keys = [f"{index:04}" for index in range(CHUNKS)]
    bucket.put(keys, np.zeros((CHUNKS, LAYERS, 512), np.uint8))
    return bucket, keys


def consume(delivery: Delivery, compute_s: float) -> None:
    for layer in delivery.layers:
        delivery.wait_layer(layer)
        delivery.consumed(layer, compute_s)


def test_a_profile_is_used_by_the_models_name(client: Client) -> None:
    bucket, keys = filled(client)
    asked = {"delivery": "layerwise", "context_tokens": CONTEXT_TOKENS}
    with bucket.fetch(keys, model="llama", **asked) as delivery:  # type: ignore[arg-type]
        assert delivery.window_source == "profile"
    with bucket.fetch(keys, **asked) as delivery:  # type: ignore[arg-type]
        assert delivery.window_source in (None, "none")
    with bucket.fetch(keys, model="llama", compute_window_s=0.001, **asked) as delivery:  # type: ignore[arg-type]
        assert delivery.window_source == "descriptor"


def test_a_profile_is_used_by_the_layouts_fingerprint(client: Client) -> None:
    bucket, keys = filled(client, fingerprint="llama")
    with bucket.fetch(keys, delivery="layerwise", context_tokens=CONTEXT_TOKENS) as delivery:
        assert delivery.window_source == "profile"


def test_a_profile_is_used_by_the_requests_fingerprint_in_a_bucket_without_a_layout(
    client: Client,
) -> None:
    name = f"windows-{secrets.token_hex(6)}"
    client.create_bucket(name)
    bucket = client.kv_bucket(name, layout("of no bucket"))
    keys = [f"{index:04}" for index in range(CHUNKS)]
    bucket.put(keys, np.zeros((CHUNKS, LAYERS, 512), np.uint8))
    for fingerprint, source in (("llama", "profile"), ("mistral-tp8", None)):
        with bucket.fetch(
            keys,
            delivery="layerwise",
            context_tokens=CONTEXT_TOKENS,
            fingerprint=fingerprint,
            computed_tokens=CONTEXT_TOKENS // 2,
        ) as delivery:
            assert delivery.window_source in (source, source or "none")


def test_a_model_without_a_profile_is_refused(client: Client) -> None:
    bucket, keys = filled(client)
    with pytest.raises(NotFound, match=r"scheduler\.profiles_dir") as caught:
        bucket.fetch(keys, model="mistral", context_tokens=CONTEXT_TOKENS)
    assert caught.value.code == "NoSuchComputeProfile"


def test_a_profile_that_is_put_there_later_is_found(
    client: Client, windows_server: RunningServer
) -> None:
    bucket, keys = filled(client)
    name = f"later-{secrets.token_hex(4)}"
    asked = {"model": name, "context_tokens": CONTEXT_TOKENS}
    with pytest.raises(NotFound):
        bucket.fetch(keys, **asked)  # type: ignore[arg-type]
    profiles: Path = windows_server.data_dir.parent / "measured"
    (profiles / f"{name}.csv").write_text(TABLE_A8)
    with bucket.fetch(keys, delivery="layerwise", **asked) as delivery:  # type: ignore[arg-type]
        assert delivery.window_source == "profile"


@pytest.mark.parametrize("client", ["shared_memory"], indirect=True)
def test_windows_are_learned_from_what_is_consumed(client: Client) -> None:
    bucket, keys = filled(client)
    with bucket.fetch(keys, delivery="layerwise", context_tokens=CONTEXT_TOKENS) as delivery:
        assert delivery.window_source in (None, "none")
        consume(delivery, WINDOW_S)

    def is_learned() -> bool:  # what was consumed is told unanswered
        with bucket.fetch(keys, delivery="layerwise", context_tokens=CONTEXT_TOKENS) as delivery:
            return delivery.window_source == "learned"

    wait_until(is_learned, "the window to be learned")
    with bucket.fetch(keys[:4], delivery="layerwise", context_tokens=CONTEXT_TOKENS) as delivery:
        assert delivery.window_source in (None, "none")  # another shape
