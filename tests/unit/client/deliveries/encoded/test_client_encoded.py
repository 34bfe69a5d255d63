"""Encoded payloads in bodies, from a scripted gateway: whole, cut, damaged, and not asked for."""

from __future__ import annotations

import socket
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from objectcache import Client, DeliveryFailed, PlainTarget
from objectcache.errors import ObjectCacheError
from objectcache.kv_bucket import KvBucket
from objectcache_encodings import SliceCodec, SliceEncoder, pack_row
from objectcache_encodings.payload_directory import PayloadDirectory, PayloadRun
from objectcache_schemas.errors import DamagedData, InvalidRequest
from objectcache_schemas.layout import KvLayout
from tests.unit.client.client_fakes import DEADLINE_S, FakeGateway, Handler, Peer, Received

LAYOUT = KvLayout(
    num_layers=3, chunk_tokens=4, per_layer_chunk_bytes=512, dtype="bfloat16", fingerprint="e"
)
COUNT = 4
KEYS = LAYOUT.chunk_keys(range(COUNT * LAYOUT.chunk_tokens))
ZSTD = "planes-zstd"


def numbers() -> npt.NDArray[np.uint8]:
    """bfloat16 of alike exponents: uint8[chunks, layers, slice_bytes]."""
    rng = np.random.default_rng(3)
    shape = (COUNT, LAYOUT.num_layers, LAYOUT.per_layer_chunk_bytes // 2)
    return (rng.integers(0, 128, shape) | 0x3F00).astype("<u2").view(np.uint8)


CHUNKS = numbers()


def encoded() -> tuple[PayloadDirectory, bytes]:
    """The first chunk as it is, and three in frames; the payload."""
    encoder = SliceEncoder(ZSTD, 2)
    rows = [pack_row(encoder.encode_slices(CHUNKS[1:, layer])) for layer in range(3)]
    runs = (
        PayloadRun(1, SliceCodec.PLAIN, (512,) * 3),
        PayloadRun(3, SliceCodec.PLANES_ZSTD, tuple(row.shape[1] for row in rows)),
    )
    directory = PayloadDirectory(runs, 512)
    layers = [CHUNKS[0, layer].tobytes() + row.tobytes() for layer, row in enumerate(rows)]
    return directory, directory.to_bytes() + b"".join(layers)


DIRECTORY, PAYLOAD = encoded()


def deliver(payload: bytes, directory_bytes: int | None = None, sent_bytes: int = -1) -> Handler:
    """Announce all of a payload, and send as much of it."""
    directory_bytes = DIRECTORY.directory_bytes if directory_bytes is None else directory_bytes

    def serve(request: Received, peer: Peer) -> None:
        said = {
            "x-objectcache-delivery": "layerwise",
            "x-objectcache-chunk-count": str(COUNT),
            "x-objectcache-directory-bytes": str(directory_bytes),
            "x-objectcache-layer-bytes": "1",
        }
        if sent_bytes < 0:
            peer.answer(200, said, payload)
        else:
            peer.answer(200, said, payload[:sent_bytes], length_bytes=len(payload))
            peer.socket.shutdown(socket.SHUT_RDWR)

    return serve


def bucket_of(client: Client) -> KvBucket:
    return KvBucket(client._core, "b", LAYOUT)


def test_layers_are_decoded_as_they_are_waited_for() -> None:
    with FakeGateway(deliver(PAYLOAD)) as gateway, gateway.client(encodings=[ZSTD]) as client:
        with bucket_of(client).fetch(KEYS, delivery="layerwise") as delivery:
            assert delivery.is_encoded
            for layer, view in delivery:
                assert np.array_equal(view, CHUNKS[:, layer])
            assert delivery.wait_layer(1) is not None
            assert np.shares_memory(delivery.wait_layer(1), delivery.wait())
            assert delivery.wire_bytes == len(PAYLOAD)
            assert delivery.delivered_bytes == CHUNKS.nbytes
        assert gateway.requests[0].descriptor.encodings == (ZSTD,)


def test_a_client_that_takes_none_says_nothing_of_it() -> None:
    def serve(request: Received, peer: Peer) -> None:
        peer.answer_delivery(
            "layerwise", COUNT, CHUNKS.transpose(1, 0, 2).tobytes(), slice_bytes=512
        )

    with FakeGateway(serve) as gateway, gateway.client() as client:
        with bucket_of(client).fetch(KEYS, delivery="layerwise") as delivery:
            assert np.array_equal(delivery.wait().transpose(1, 0, 2), CHUNKS)
            assert (delivery.is_encoded, delivery.wire_bytes) == (False, CHUNKS.nbytes)
        assert gateway.requests[0].descriptor.encodings is None
        assert b"encodings" not in gateway.requests[0].descriptor.to_bytes()


def before_encodings(request: Received, peer: Peer) -> None:
    """A gateway before a storage server that does not know the field."""
    if request.descriptor.encodings is not None:
        message = "descriptor: Object contains unknown field `encodings`"
        code = "InvalidDescriptor"
        xml = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
        peer.answer(400, body=xml.encode())
        return
    peer.answer_delivery("layerwise", COUNT, CHUNKS.transpose(1, 0, 2).tobytes(), slice_bytes=512)


@pytest.mark.parametrize("into_target", [False, True])
def test_a_server_from_before_encodings_is_asked_without_them_and_that_is_remembered(
    into_target: bool,
) -> None:
    with (
        FakeGateway(before_encodings) as gateway,
        gateway.client(encodings=[ZSTD]) as client,
    ):
        for _ in range(2):
            target = PlainTarget(bytearray(CHUNKS.nbytes)) if into_target else None
            with bucket_of(client).fetch(KEYS, delivery="layerwise", target=target) as delivery:
                assert np.array_equal(delivery.wait().transpose(1, 0, 2), CHUNKS)
                assert not delivery.is_encoded
        asked = [request.descriptor.encodings for request in gateway.requests]
        assert asked == [(ZSTD,), None, None]


def test_another_refusal_is_not_taken_for_one_of_encodings() -> None:
    def refuse(request: Received, peer: Peer) -> None:
        xml = b"<Error><Code>InvalidDescriptor</Code><Message>no such layer</Message></Error>"
        peer.answer(400, body=xml)

    with FakeGateway(refuse) as gateway, gateway.client(encodings=[ZSTD]) as client:
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="no such layer"):
                bucket_of(client).fetch(KEYS, delivery="layerwise")
        assert [one.descriptor.encodings for one in gateway.requests] == [(ZSTD,), (ZSTD,)]


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_a_body_that_is_cut_has_the_layers_that_came(layers: int) -> None:
    cut = DIRECTORY.layer_offsets[layers] + 5
    with (
        FakeGateway(deliver(PAYLOAD, sent_bytes=cut)) as gateway,
        gateway.client(encodings=[ZSTD]) as client,
        bucket_of(client).fetch(KEYS, delivery="layerwise") as delivery,
    ):
        with pytest.raises(DeliveryFailed) as caught:
            delivery.wait()
        assert caught.value.details.layer == layers
        for layer in range(layers):
            assert np.array_equal(delivery.wait_layer(layer), CHUNKS[:, layer])


def test_a_body_that_is_cut_within_its_directory_has_no_layer() -> None:
    with (
        FakeGateway(deliver(PAYLOAD, sent_bytes=DIRECTORY.directory_bytes - 1)) as gateway,
        gateway.client(encodings=[ZSTD]) as client,
        bucket_of(client).fetch(KEYS, delivery="layerwise") as delivery,
        pytest.raises(DeliveryFailed, match="the body was cut"),
    ):
        delivery.wait_layer(0)


def flipped(at_bytes: int) -> bytes:
    damaged = bytearray(PAYLOAD)
    damaged[at_bytes] ^= 1
    return bytes(damaged)


def test_a_damaged_frame_fails_its_layer_with_the_chunk_named() -> None:
    row = list(DIRECTORY.rows(1))[1]
    payload = flipped(row.offset_bytes + row.pitch_bytes + 20)  # the second frame, of chunk 2
    with (
        FakeGateway(deliver(payload)) as gateway,
        gateway.client(encodings=[ZSTD]) as client,
        bucket_of(client).fetch(KEYS, delivery="layerwise") as delivery,
    ):
        assert np.array_equal(delivery.wait_layer(0), CHUNKS[:, 0])
        for _ in range(2):
            with pytest.raises(DeliveryFailed, match="layer 1 is damaged: chunk 2") as caught:
                delivery.wait_layer(1)
            details = caught.value.details
            assert (details.layer, details.key) == (1, KEYS[2])
            assert isinstance(caught.value.__cause__, DamagedData)
        with pytest.raises(DeliveryFailed, match="layer 1 is damaged"):
            delivery.wait_layer(2)
        with pytest.raises(DeliveryFailed, match="layer 1 is damaged"):
            delivery.wait()
        assert np.array_equal(delivery.wait_layer(0), CHUNKS[:, 0])


def longer() -> bytes:
    """A payload whose directory says less than comes."""
    return PAYLOAD + bytes(64)


@pytest.mark.parametrize("payload", [flipped(9), flipped(DIRECTORY.directory_bytes - 1), longer()])
def test_a_directory_that_cannot_be_fails_the_delivery_before_its_first_layer(
    payload: bytes,
) -> None:
    with (
        FakeGateway(deliver(payload)) as gateway,
        gateway.client(encodings=[ZSTD]) as client,
        bucket_of(client).fetch(KEYS, delivery="layerwise") as delivery,
    ):
        with pytest.raises(DeliveryFailed, match="directory") as caught:
            delivery.wait_layer(0)
        assert caught.value.details.layer == 0


@pytest.mark.parametrize(
    ("handler", "encodings", "words"),
    [
        (lambda: deliver(PAYLOAD), [], "sent x-objectcache-directory-bytes: 64"),
        (lambda: deliver(bytes(CHUNKS.nbytes)), [ZSTD], "for an encoded payload of 6144"),
        (lambda: deliver(bytes(64)), [ZSTD], "announced a body of 64 bytes"),
        (lambda: deliver(PAYLOAD, 6144), [ZSTD], "directory-bytes: 6144"),
    ],
)
def test_an_answer_that_makes_no_sense_is_refused(
    handler: Callable[[], Handler], encodings: list[str], words: str
) -> None:
    with (
        FakeGateway(handler()) as gateway,
        gateway.client(encodings=encodings) as client,
        pytest.raises(ObjectCacheError, match=words),
    ):
        bucket_of(client).fetch(KEYS, delivery="layerwise")


def test_layers_that_came_may_be_asked_for_after_the_close_too() -> None:
    with FakeGateway(deliver(PAYLOAD)) as gateway, gateway.client(encodings=[ZSTD]) as client:
        with bucket_of(client).fetch(KEYS, delivery="layerwise") as delivery:
            delivery.wait_layer(2)
        for layer in range(3):
            assert np.array_equal(delivery.wait_layer(layer), CHUNKS[:, layer])


def test_a_layer_that_was_not_asked_for_before_the_close_is_not_made_in_a_target_after_it() -> None:
    target = PlainTarget(bytearray(CHUNKS.nbytes))
    with FakeGateway(deliver(PAYLOAD)) as gateway, gateway.client(encodings=[ZSTD]) as client:
        with bucket_of(client).fetch(KEYS, delivery="layerwise", target=target) as delivery:
            first = delivery.wait_layer(0)
            assert delivery.progress.wait_ended(DEADLINE_S)
        assert np.array_equal(first, CHUNKS[:, 0])
        assert np.array_equal(delivery.wait_layer(0), first)
        with pytest.raises(DeliveryFailed, match="not asked for before the close"):
            delivery.wait_layer(1)
        with bucket_of(client).fetch(KEYS, delivery="layerwise", target=target) as delivery:
            assert np.array_equal(delivery.wait().transpose(1, 0, 2), CHUNKS)
