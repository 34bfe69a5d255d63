"""Fetch, put and layout calls against a scripted gateway, by response body."""

from __future__ import annotations

import gc
import re
import warnings
from typing import Any

import msgspec
import numpy as np
import pytest

import objectcache
from objectcache import Client, PlainTarget
from objectcache.errors import Conflict, InvalidRequest, NotFound, ObjectCacheError, Unavailable
from objectcache.kv_bucket import KvBucket
from objectcache_schemas.descriptor import DeliveryMode, Descriptor, OnMissing
from objectcache_schemas.layout import KvLayout
from objectcache_schemas.limits import Limits
from tests.unit.client.client_fakes import (
    DEADLINE_S,
    KEYS,
    LAYOUT,
    FakeGateway,
    Handler,
    Peer,
    Received,
    chunks_of,
    payload_of,
)

OTHER = KvLayout(
    num_layers=3, chunk_tokens=4, per_layer_chunk_bytes=41, dtype="uint8", fingerprint="test"
)


def deliver(mode: str) -> Handler:
    def serve(request: Received, peer: Peer) -> None:
        asked = request.descriptor
        chunks = chunks_of(5)[: len(asked.chunk_keys), asked.first_layer : asked.end_layer]
        body = (chunks if mode == "chunkwise" else chunks.transpose(1, 0, 2)).tobytes()
        peer.answer_delivery(mode, len(asked.chunk_keys), body)

    return serve


def bucket_of(client: Client) -> KvBucket:
    return KvBucket(client._core, "b", LAYOUT)


@pytest.mark.parametrize("mode", ["layerwise", "chunkwise"])
@pytest.mark.parametrize("layers", [None, (1, 2), (1, 3)])
def test_layers_arrive_as_views_of_one_payload(mode: str, layers: tuple[int, int] | None) -> None:
    with FakeGateway(deliver(mode)) as gateway, gateway.client() as client:
        with bucket_of(client).fetch(KEYS, layers=layers) as delivery:
            assert (delivery.mode, delivery.transport) == (mode, "body")
            assert (delivery.chunk_count, delivery.request_id) == (5, "request-1")
            payload = delivery.wait()
            for layer, kv in delivery:
                assert kv.shape == (5, 40)
                assert np.array_equal(kv, chunks_of(5)[:, layer])
                assert np.shares_memory(kv, payload)
            assert list(delivery.layers) == list(range(*(layers or (0, 3))))
            assert all(arrival is not None for arrival in delivery.arrivals_s)
        assert gateway.listener.connection_count == 1
        with bucket_of(client).fetch(KEYS[:2]) as second:
            second.wait()
        assert gateway.listener.connection_count == 1


def test_every_choice_of_a_fetch_is_in_the_descriptor() -> None:
    with FakeGateway(deliver("chunkwise")) as gateway, gateway.client() as client:
        with bucket_of(client).fetch(
            KEYS,
            delivery="chunkwise",
            layers=(1, 3),
            on_missing="truncate",
            compute_window_s=0.25,
            context_tokens=100,
            model="llama-3.1-8b",
            rate_bytes_per_s=5_000_000,
        ) as delivery:
            delivery.wait()
        asked = gateway.requests[0].descriptor
        assert asked == Descriptor(
            *(tuple(KEYS), 3, 4, 40, DeliveryMode.CHUNKWISE, (1, 3), OnMissing.TRUNCATE, 0.25),
            context_tokens=100,
            model="llama-3.1-8b",
            rate_bytes_per_s=5_000_000.0,
        )


def test_a_get_names_itself_and_says_what_the_client_spent() -> None:
    with FakeGateway(deliver("layerwise")) as gateway, gateway.client() as client:
        for _ in range(2):
            with bucket_of(client).fetch(KEYS) as delivery:
                assert delivery.request_id == "request-1"  # what the server says counts
        ids = [request.headers["x-objectcache-request-id"] for request in gateway.requests]
        assert all(re.fullmatch("[0-9A-F]{16}", request_id) for request_id in ids)
        assert ids[0] != ids[1]
        for request in gateway.requests:
            spent = request.headers["x-objectcache-client-seconds"]
            assert re.fullmatch(r"\d+\.\d{6}", spent)
            assert 0 < float(spent) < DEADLINE_S
            assert "x-objectcache-path" not in request.headers
            assert "traceparent" not in request.headers


def test_requests_that_begin_no_delivery_carry_none_of_this() -> None:
    def serve(request: Received, peer: Peer) -> None:
        peer.answer(body=msgspec.msgpack.encode({"v": 1, "matched": 5}))

    with FakeGateway(serve) as gateway, gateway.client() as client:
        assert bucket_of(client).match(KEYS) == 5
        assert not [name for name in gateway.requests[0].headers if "objectcache" in name]


@pytest.mark.parametrize(("path", "mode"), [("agg", "layerwise"), ("batch", "chunkwise")])
def test_a_forced_path_is_a_header_and_decides_the_mode(path: str, mode: str) -> None:
    with FakeGateway(deliver(mode)) as gateway, gateway.client() as client:
        with bucket_of(client).fetch(KEYS, path=path) as delivery:
            assert np.array_equal(delivery.wait(), chunks_of(5).transpose(1, 0, 2))
        (request,) = gateway.requests
        assert request.headers["x-objectcache-path"] == path
        assert request.descriptor.delivery.value == mode


def test_what_the_server_decided_is_told_by_the_delivery() -> None:
    def serve(request: Received, peer: Peer) -> None:
        said = {
            "x-objectcache-delivery": "layerwise",
            "x-objectcache-chunk-count": "5",
            "x-objectcache-request-id": request.headers["x-objectcache-request-id"],
            "x-objectcache-path": "agg",
            "x-objectcache-transport": "tcp",
            "x-objectcache-rate": "1250000000",
            "x-objectcache-window-source": "learned",
        }
        peer.answer(200, said, payload_of(5))

    with (
        FakeGateway(serve) as gateway,
        gateway.client() as client,
        bucket_of(client).fetch(KEYS) as delivery,
    ):
        assert (delivery.path, delivery.window_source) == ("agg", "learned")
        assert delivery.rate_bytes_per_s == 1_250_000_000
        assert delivery.transport == "body"
        assert delivery.request_id == gateway.requests[0].headers["x-objectcache-request-id"]


def test_a_server_that_says_nothing_of_this_is_fine() -> None:
    with FakeGateway(deliver("layerwise")) as gateway, gateway.client() as client:
        for keys in (KEYS, []):
            with bucket_of(client).fetch(keys) as delivery:
                assert (delivery.path, delivery.window_source) == (None, None)
                assert delivery.rate_bytes_per_s is None


@pytest.mark.parametrize("chunk_count", [0, 2])
def test_a_truncated_prefix_says_how_long_it_is(chunk_count: int) -> None:
    def serve(request: Received, peer: Peer) -> None:
        peer.answer_delivery("layerwise", chunk_count, bytes(chunk_count * 120))

    with FakeGateway(serve) as gateway, gateway.client() as client:
        delivery = bucket_of(client).fetch(KEYS, on_missing="truncate")
        with delivery:
            assert delivery.chunk_count == chunk_count
            assert delivery.wait().shape == (3, chunk_count, 40)


def test_a_missing_chunk_is_raised_by_fetch_itself() -> None:
    xml = b"<Error><Code>NoSuchKey</Code><Message>m</Message><MissingIndex>3</MissingIndex></Error>"
    with (
        FakeGateway(lambda request, peer: peer.answer(404, body=xml)) as gateway,
        gateway.client() as client,
    ):
        with pytest.raises(NotFound) as caught:
            bucket_of(client).fetch(KEYS)
        assert caught.value.details.missing_index == 3


def test_no_keys_are_an_empty_delivery_without_a_request() -> None:
    with FakeGateway(deliver("layerwise")) as gateway, gateway.client() as client:
        bucket = bucket_of(client)
        assert bucket.match([]) == 0
        with bucket.fetch([], layers=(1, 3)) as delivery:
            assert [(layer, kv.shape) for layer, kv in delivery] == [(1, (0, 40)), (2, (0, 40))]
        assert bucket.put([], []) == objectcache.PutResult(stored=0, existing=0)
        with pytest.raises(InvalidRequest, match="layers"):
            bucket.fetch([], layers=(2, 4))
        assert gateway.requests == []


def test_a_plain_target_is_filled_and_may_be_reused() -> None:
    buffer = bytearray(700)
    target = PlainTarget(buffer)
    with FakeGateway(deliver("layerwise")) as gateway, gateway.client() as client:
        for _ in range(2):
            with bucket_of(client).fetch(KEYS, target=target) as delivery:
                delivery.wait()
                assert bytes(buffer[:600]) == payload_of(5)
            buffer[:] = bytes(700)


def test_a_target_takes_one_delivery_at_a_time() -> None:
    def serve(request: Received, peer: Peer) -> None:
        peer.answer_delivery("layerwise", 5, b"", 600)
        peer.wait_closed()

    target = PlainTarget(bytearray(600))
    with FakeGateway(serve) as gateway, gateway.client() as client:
        for _ in range(2):
            delivery = bucket_of(client).fetch(KEYS, target=target)
            with delivery, pytest.raises(InvalidRequest, match="in use"):
                bucket_of(client).fetch(KEYS, target=target)
            assert "free" in repr(target)


def test_a_target_that_is_too_small_is_refused_with_both_sizes() -> None:
    with FakeGateway(deliver("layerwise")) as gateway, gateway.client() as client:
        with pytest.raises(InvalidRequest, match=r"599 bytes.*needs 600"):
            bucket_of(client).fetch(KEYS, target=PlainTarget(bytearray(599)))
        assert gateway.requests == []


@pytest.mark.parametrize(
    "buffer", [bytes(10), np.zeros((4, 4), np.uint8)[:, 1], "text"], ids=["readonly", "strided", ""]
)
def test_a_buffer_that_cannot_be_filled_is_refused(buffer: object) -> None:
    with pytest.raises(InvalidRequest, match="target"):
        PlainTarget(buffer)


@pytest.mark.parametrize(
    "arguments",
    [{"delivery": "fast"}, {"on_missing": "skip"}, {"transport": "pigeon"}, {"layers": (2, 1)}],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any]) -> None:
    with FakeGateway(deliver("layerwise")) as gateway, gateway.client() as client:
        with pytest.raises(InvalidRequest):
            bucket_of(client).fetch(KEYS, **arguments)
        assert gateway.requests == []


def stored_reply(stored: int, existing: int) -> bytes:
    return msgspec.msgpack.encode({"v": 1, "stored": stored, "existing": existing})


@pytest.mark.parametrize("remote", [False, True])
def test_a_put_by_layers_is_one_request_in_layer_order(
    remote: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if remote:  # as over plain HTTP to another host, where bodies are signed
        monkeypatch.setattr("objectcache.channel.endpoint.is_loopback", lambda host: False)
    chunks = chunks_of(5)
    with (
        FakeGateway(lambda request, peer: peer.answer(body=stored_reply(4, 1))) as gateway,
        gateway.client() as client,
    ):
        with bucket_of(client).put_layers(KEYS) as put:
            scratch = np.empty((5, 40), np.uint8)
            for layer in range(3):
                scratch[:] = chunks[:, layer]
                put.write_layer(scratch)
        assert put.result == objectcache.PutResult(stored=4, existing=1)
        body = gateway.requests[0].body
        descriptor_end = 4 + int.from_bytes(body[:4], "big")
        descriptor = Descriptor.from_bytes(body[4:descriptor_end], Limits())
        assert descriptor.delivery is DeliveryMode.LAYERWISE
        assert body[descriptor_end:] == payload_of(5)
        unsigned = gateway.requests[0].headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
        assert unsigned is not remote


def test_a_put_that_lacks_layers_stores_nothing() -> None:
    with FakeGateway(lambda request, peer: peer.answer()) as gateway, gateway.client() as client:
        put = bucket_of(client).put_layers(KEYS)
        put.write_layer(bytes(200))
        with pytest.raises(InvalidRequest, match="199 bytes"):
            put.write_layer(bytes(199))
        with pytest.raises(InvalidRequest, match="1 of 3 layers"):
            put.close()
        assert put.result is None
        with pytest.raises(InvalidRequest, match="closed"):
            put.write_layer(bytes(200))
    with pytest.raises(KeyError), bucket_of(client).put_layers(KEYS):
        raise KeyError  # the caller's own error, not ours


def layout_gateway(stored: KvLayout | None) -> FakeGateway:
    def serve(request: Received, peer: Peer) -> None:
        if request.method == "GET" and stored is not None:
            peer.answer(body=stored.to_bytes())
        elif request.method == "GET":
            xml = b"<Error><Code>NoSuchKvLayout</Code><Message>none</Message></Error>"
            peer.answer(404, body=xml)
        elif "kv-layout" not in request.target:
            xml = b"<Error><Code>BucketAlreadyOwnedByYou</Code><Message>yours</Message></Error>"
            peer.answer(409, body=xml)
        else:
            peer.answer()

    return FakeGateway(serve)


def test_a_bucket_with_another_layout_is_a_conflict_that_names_the_field() -> None:
    with layout_gateway(OTHER) as gateway, gateway.client() as client:
        with pytest.raises(Conflict, match="per_layer_chunk_bytes is 40 here and 41") as caught:
            client.kv_bucket("b", LAYOUT)
        assert caught.value.code == "KvLayoutConflict"
        assert client.kv_bucket("b", OTHER).layout == OTHER


def test_a_bucket_may_have_no_layout() -> None:
    with layout_gateway(None) as gateway, gateway.client() as client:
        assert client.kv_bucket("b", LAYOUT).name == "b"


def test_creating_a_bucket_that_is_there_gives_it_the_layout() -> None:
    with layout_gateway(None) as gateway, gateway.client() as client:
        client.kv_bucket("b", LAYOUT, create=True)
        assert [(r.method, r.target) for r in gateway.requests] == [
            ("PUT", "/b"),
            ("PUT", "/b?kv-layout"),
        ]
        assert KvLayout.from_bytes(gateway.requests[1].body) == LAYOUT


def test_a_client_from_the_environment_names_the_variable_that_is_missing() -> None:
    environment = {
        "OBJECTCACHE_ENDPOINT": "http://127.0.0.1:1",
        "OBJECTCACHE_ACCESS_KEY": "a",
        "OBJECTCACHE_SECRET_KEY": "s",
    }
    assert "http://127.0.0.1:1" in repr(Client.from_environment(environment))
    for name in environment:
        with pytest.raises(InvalidRequest, match=name):
            Client.from_environment({**environment, name: ""})


@pytest.mark.parametrize(
    "options",
    [{"timeout_s": 0}, {"connections_max": 0}, {"target_bytes_max": 0}, {"transport": "x"}],
)
def test_wrong_options_of_a_client_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(options))):
        Client("http://127.0.0.1:1", access_key="a", secret_key="s", **options)


def test_a_client_that_nobody_uses_closes_itself() -> None:
    with FakeGateway(deliver("layerwise")) as gateway:
        delivery = bucket_of(gateway.client()).fetch(KEYS)  # keeps the client's core alive
        payload = delivery.wait()
        delivery.close()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # an unclosed socket would warn
            del delivery
            gc.collect()
        assert payload.tobytes() == payload_of(5)


def test_a_closed_client_says_so() -> None:
    with FakeGateway(deliver("layerwise")) as gateway:
        client = gateway.client()
        client.close()
        client.close()
        with pytest.raises(Unavailable, match="the client is closed"):
            client.get_layout("b")


def test_all_names_are_exported_and_the_version_is_the_packages() -> None:
    import importlib.metadata

    for name in objectcache.__all__:
        assert hasattr(objectcache, name)
    errors = {error.__name__ for error in ObjectCacheError.__subclasses__()}
    assert errors <= set(objectcache.__all__)
    assert objectcache.__version__ == importlib.metadata.version("objectcache")
