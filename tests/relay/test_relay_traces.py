"""One trace from an engine over a relay to the storage server."""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from objectcache import NotFound
from tests.relay.relays import (
    BUCKET,
    CHUNKS,
    LAYOUT,
    NIXL,
    PAYLOAD_BYTES,
    SETTINGS,
    TOKENS,
    RunningRelay,
    client_of,
    stocked_server,
)
from tests.relay.span_collector import Collector, attributes, collecting
from tests.servers import start_server


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collecting(monkeypatch) as running:
        yield running


@pytest.mark.parametrize("transport", ["body", "shared_memory", NIXL])
def test_a_get_over_a_relay_is_one_trace_of_engine_relay_and_storage_server(
    collector: Collector, tmp_path: Path, transport: str
) -> None:
    trace: Any = importlib.import_module("opentelemetry.trace")
    expected = list[tuple[str, int, int]]()  # request, trace and span of the engine
    keys = LAYOUT.chunk_keys(TOKENS)
    with stocked_server(tmp_path / "data") as server:
        with (
            RunningRelay(server, tmp_path / "relay.log", "relay.hold_s=60") as relay,
            relay.client(transport) as client,
        ):
            bucket = client.kv_bucket(BUCKET, LAYOUT)
            for layers in ((0, 8), (0, 8), (2, 5)):  # over HTTP, over the session, of what landed
                context = trace.SpanContext(
                    secrets.randbits(127) + 1, secrets.randbits(63) + 1, False, trace.TraceFlags(1)
                )
                with (
                    trace.use_span(trace.NonRecordingSpan(context)),
                    bucket.fetch(keys, delivery="layerwise", layers=layers) as delivery,
                ):
                    whole = CHUNKS[:, layers[0] : layers[1]].transpose(1, 0, 2)
                    assert np.array_equal(delivery.wait(), whole)
                expected.append((delivery.request_id, context.trace_id, context.span_id))
            assert relay.process.terminate() == 0  # which sends what is queued
        server.stop()
    for number, (request_id, trace_id, span_id) in enumerate(expected):
        ((service, forwarded),) = collector.named("objectcache.relay", request_id)
        assert service == "objectcache-relay"
        assert int.from_bytes(forwarded.trace_id) == trace_id
        assert int.from_bytes(forwarded.parent_span_id) == span_id
        facts = attributes(forwarded)
        assert facts["objectcache.first_use"] == (number == 0)
        assert facts["objectcache.payload_bytes"] == PAYLOAD_BYTES * (3 if number == 2 else 8) // 8
        assert facts["objectcache.bucket"] == BUCKET
        delivered = collector.named("objectcache.delivery", request_id)
        assert len(delivered) == (1 if number == 0 else 0)  # the others were sent what had landed
        asked = {
            span.span_id: span
            for _, span in collector.spans
            if span.name == "objectcache.request" and span.trace_id == forwarded.trace_id
        }
        for service, span in delivered:
            assert service == "objectcache-storage"
            assert span.trace_id == forwarded.trace_id
            request = asked.get(span.parent_span_id)  # of a gateway, where it was asked over HTTP
            parent = span.parent_span_id if request is None else request.parent_span_id
            assert parent == forwarded.span_id
    sent = b"".join(collector.bodies)
    assert server.credentials.secret_key.encode() not in sent
    assert keys[0].encode() not in sent


def test_a_get_that_fails_is_a_span_with_its_code(collector: Collector, tmp_path: Path) -> None:
    with start_server(tmp_path / "data", *SETTINGS) as server:
        with client_of(server) as client:
            client.kv_bucket(BUCKET, LAYOUT, create=True)
        with RunningRelay(server, tmp_path / "relay.log") as relay:
            with relay.client() as client, pytest.raises(NotFound):
                client.kv_bucket(BUCKET, LAYOUT).fetch(["absent"])
            assert relay.process.terminate() == 0
        server.stop()
    (failed,) = [span for _, span in collector.spans if span.name == "objectcache.relay"]
    assert attributes(failed)["objectcache.error_code"] == "NoSuchKey"
    assert "objectcache.payload_bytes" not in attributes(failed)
