"""Transformers' cache over a fetcher: its workers decode the layers that the model takes."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from examples import transformers_prefix_reuse
from tests.encoded_delivery.prefixes import ZSTD
from tests.engines.fetched.encoded_bucket import encoded_server
from tests.engines.test_transformers import Stored, client_of
from tests.fetcher.fetchers import RunningFetcher

BUCKET = "transformers"


def test_layers_over_a_fetcher_give_the_logits_of_local_reuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        encoded_server(tmp_path / "data", BUCKET) as server,
        RunningFetcher(server, tmp_path / "fetcher.log") as fetcher,
    ):
        endpoint = fetcher.endpoint
        with client_of(server, fetcher=endpoint) as client:
            stored = Stored(client, torch.bfloat16, BUCKET)
            logits, _ = stored.reused(delivery="layerwise")
            assert torch.equal(logits, stored.run(stored.suffix, copy.deepcopy(stored.local)))
            payload_bytes = len(stored.keys) * stored.bucket.layout.chunk_bytes
        assert fetcher.decoded_bytes == {ZSTD: payload_bytes}
        monkeypatch.setenv("OBJECTCACHE_ENDPOINT", server.endpoint)
        monkeypatch.setenv("OBJECTCACHE_ACCESS_KEY", server.credentials.access_key)
        monkeypatch.setenv("OBJECTCACHE_SECRET_KEY", server.credentials.secret_key)
        monkeypatch.setenv("OBJECTCACHE_FETCHER", endpoint)
        transformers_prefix_reuse.main()
        assert "1024 of 1064 tokens reused" in capsys.readouterr().out
        assert fetcher.decoded_bytes["plain"] > 0  # the example's bucket is stored as it is
