"""Mistakes in what a caller passes are told by the argument's name, and nothing is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from objectcache import Client, InvalidRequest, PlainTarget
from objectcache.channel.access_key import SigningKey
from objectcache.channel.endpoint import Endpoint
from objectcache.core import ClientCore
from objectcache.deliveries.layer_progress import LayerProgress
from objectcache.kv_bucket import KvBucket
from tests.unit.client.client_fakes import KEYS, LAYOUT, FakeGateway

NOWHERE = "http://127.0.0.1:1"


def client_of(**arguments: Any) -> Client:
    return Client(NOWHERE, **{"access_key": "key", "secret_key": "secret"} | arguments)


def bucket() -> KvBucket:
    return KvBucket(client_of()._core, "b", LAYOUT)


def test_no_encoding_may_be_said_with_none() -> None:
    settings = client_of(encodings=None, put_encoding=None)._core.settings
    assert (settings.encodings, settings.put_encoding) == ((), "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"layers": 3}, "layers must be .* got 3"),
        ({"layers": (0.0, 2.0)}, "layers must be"),
        ({"layers": (0, 1, 2)}, "layers must be"),
        ({"layers": ()}, "layers must be"),
        ({"compute_window_s": "1"}, "compute_window_s must be"),
        ({"compute_window_s": float("nan")}, "compute_window_s must be"),
        ({"compute_window_s": [1.0]}, "compute_window_s must be"),
        ({"compute_window_s": True}, "compute_window_s must be"),
        ({"compute_window_s": 10**400}, "compute_window_s must be"),
        ({"context_tokens": 1}, "context_tokens is 1, but chunk_keys alone hold"),
        ({"context_tokens": 0}, "context_tokens must be a whole number, 1 or more, got 0"),
        ({"context_tokens": 4096.0}, "context_tokens must be a whole number"),
        ({"context_tokens": (1 << 40) + 1}, "context_tokens must be at most 1099511627776"),
        ({"model": 7}, "model must be a string, got int"),
        ({"model": "../etc"}, "model must be 1 to 128 letters"),
        ({"rate_bytes_per_s": 0.5}, "rate_bytes_per_s must be .* 65536 or more, got 0.5"),
        ({"rate_bytes_per_s": 65_535}, "rate_bytes_per_s must be .* 65536 or more, got 65535"),
        ({"rate_bytes_per_s": float("inf")}, "rate_bytes_per_s must be a finite number"),
        ({"rate_bytes_per_s": "1G"}, "rate_bytes_per_s must be .* got '1G'"),
        (
            {"path": "rdma"},
            "path must be one of s3tcp, buffer, direct, batch, agg, got 'rdma'",
        ),
        ({"path": "s3tcp"}, "s3tcp is a plain GET of one object: use get_object"),
        ({"path": "agg", "delivery": "chunkwise"}, "path agg is layerwise: delivery must be"),
        ({"path": "batch", "delivery": "layerwise"}, "path batch is chunkwise: delivery must be"),
        ({"path": "direct"}, "direct delivers one object: chunk_keys must name 1 chunk, got 5"),
        ({"path": "buffer"}, "buffer delivers one object.*use batch or agg for more"),
        ({"timeout_s": -1}, "timeout_s must be .* got -1"),
        ({"timeout_s": "1"}, "timeout_s must be"),
        ({"timeout_s": 1e9}, "timeout_s must be .* at most 2000000"),
        ({"target": bytearray(600)}, r"target must be a PlainTarget .*bytearray"),
        ({"target": np.empty(600, np.uint8)}, r"target must be .*PlainTarget\(buffer\)"),
        ({"on_missing": "foo"}, "on_missing must be one of fail, truncate, got 'foo'"),
        ({"delivery": "foo"}, "delivery must be one of auto, layerwise, chunkwise, got 'foo'"),
    ],
)
def test_a_wrong_argument_of_a_fetch_is_named(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        bucket().fetch(KEYS, **arguments)


@pytest.mark.parametrize("path", ["direct", "buffer"])
def test_a_path_into_a_target_needs_registered_memory(path: str) -> None:
    with pytest.raises(InvalidRequest, match=f"path {path} writes into registered memory"):
        bucket().fetch(KEYS[:1], path=path, transport="body")
    with pytest.raises(InvalidRequest, match="PlainTarget cannot be filled through shared memory"):
        bucket().fetch(KEYS[:1], path=path, target=PlainTarget(bytearray(600)))


@pytest.mark.parametrize("value", [1, "yes", None])
def test_whether_windows_are_learned_is_true_or_false(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="learn_windows must be True or False"):
        client_of(learn_windows=value)


@pytest.mark.parametrize("keys", ["abcde", b"abcde", 5, None, ["a", 7]])
def test_one_key_is_no_list_of_keys(keys: Any) -> None:
    chunks = np.zeros((5, 3, 40), np.uint8)
    for call in (bucket().match, bucket().fetch, bucket().put_layers):
        with pytest.raises(InvalidRequest, match="chunk_keys"):
            call(keys)
    with pytest.raises(InvalidRequest, match="chunk_keys"):
        bucket().put(keys, chunks)


@pytest.mark.parametrize(
    "tokens", ["12345678", np.zeros((2, 4), np.int64), [[1, 2], [3, 4]], [[1], [2, 3]], 7]
)
def test_tokens_are_one_sequence_of_ids(tokens: Any) -> None:
    with pytest.raises(InvalidRequest, match="tokens must be one sequence"):
        bucket().chunk_keys(tokens)


def test_tokens_may_be_a_list_an_array_or_bytes() -> None:
    keys = bucket().chunk_keys(list(range(8)))
    assert len(keys) == 2
    assert bucket().chunk_keys(np.arange(8)) == bucket().chunk_keys(bytes(range(8))) == keys
    assert bucket().chunk_keys([]) == []


@pytest.mark.parametrize("layer", [1.0, "0", None])
def test_a_layer_is_a_whole_number(layer: Any) -> None:
    with pytest.raises(InvalidRequest, match="layer must be a whole number"):
        LayerProgress(0, 3).wait(layer, 0)


@pytest.mark.parametrize("length_bytes", [1.5, 0, "1", None])
def test_a_shared_target_has_a_whole_number_of_bytes(length_bytes: Any) -> None:
    with client_of() as client, pytest.raises(InvalidRequest, match="length_bytes must be"):
        client.shared_memory_target(length_bytes)


@pytest.mark.parametrize("name", ["access_key", "secret_key", "session_token"])
@pytest.mark.parametrize("value", [7, b"key", "", "pass\nword", "p\u00e4ss"])
def test_a_wrong_credential_is_named_and_not_shown(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} must be") as caught:
        client_of(**{name: value})
    assert "word" not in caught.value.message
    if name != "session_token":
        with pytest.raises(InvalidRequest, match=f"{name} must be a string"):
            client_of(**{name: None})


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("region", 7, "region must be a string, got int"),
        ("region", "", "region must be printable ASCII, and not empty"),
        ("transport", 7, "transport must be one of auto"),
        ("timeout_s", True, "timeout_s must be a number of seconds"),
        ("connections_max", "3", "connections_max must be a whole number"),
        ("target_bytes_max", 1.5, "target_bytes_max must be a whole number"),
        ("tls", "ca.pem", r"tls must be an ssl\.SSLContext, got str"),
        ("fabric", "nixl", "fabric must be a FabricSettings, got str"),
    ],
)
def test_an_argument_of_a_client_of_another_type_is_named(
    name: str, value: Any, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        client_of(**{name: value})


@pytest.mark.parametrize("wrong", [7, None, b"http://127.0.0.1:9000"])
def test_an_endpoint_is_a_string(wrong: Any) -> None:
    with pytest.raises(
        InvalidRequest, match=f"endpoint must be a string, got {type(wrong).__name__}"
    ):
        Client(wrong, access_key="a", secret_key="b")


@pytest.mark.parametrize("wrong", [7, None, b"bucket"])
def test_the_name_of_a_bucket_is_a_string(wrong: Any) -> None:
    calls: list[Callable[[Client], object]] = [
        lambda client: client.create_bucket(wrong),
        lambda client: client.delete_bucket(wrong),
        lambda client: client.get_layout(wrong),
    ]
    with client_of() as client:
        for call in calls:
            with pytest.raises(InvalidRequest, match="bucket must be a string"):
                call(client)


def test_a_header_that_cannot_be_sent_is_named_without_its_value() -> None:
    with FakeGateway(lambda request, peer: peer.answer()) as gateway:
        settings = client_of()._core.settings
        key = SigningKey("hidden\nkey", "secret")
        core = ClientCore(Endpoint.parse(gateway.url), lambda: key, settings)
        with pytest.raises(InvalidRequest, match="header authorization") as caught:
            Client.from_core(core).create_bucket("b")
        core.close()
        assert gateway.requests == []
    assert "hidden" not in caught.value.message
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("create", [False, True])
def test_a_layout_is_no_dict(create: bool) -> None:
    layout: Any = {"num_layers": 3}
    with client_of() as client:
        with pytest.raises(InvalidRequest, match="layout must be a KvLayout, got dict"):
            client.kv_bucket("b", layout, create=create)
        with pytest.raises(InvalidRequest, match="layout must be a KvLayout"):
            client.put_layout("b", layout)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"nic": 7}, "nic must be a string, got int"),
        ({"nic": "rack 1"}, "nic must be 1 to 128 letters"),
        ({"nic_bytes_per_s": 1e9}, "nic_bytes_per_s is the rate of a NIC, which nic must name"),
        ({"nic": "node7", "nic_bytes_per_s": 0}, "nic_bytes_per_s must be .* got 0"),
        ({"nic": "node7", "nic_bytes_per_s": "1G"}, "nic_bytes_per_s must be .* got '1G'"),
    ],
)
def test_a_nic_has_a_name_and_a_rate(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        client_of(**arguments)


def test_the_environment_names_the_hosts_nic() -> None:
    environment = {
        "OBJECTCACHE_ENDPOINT": NOWHERE,
        "OBJECTCACHE_ACCESS_KEY": "key",
        "OBJECTCACHE_SECRET_KEY": "secret",
        "OBJECTCACHE_NIC": "node7",
        "OBJECTCACHE_NIC_BYTES_PER_S": "5e9",
    }
    settings = Client.from_environment(environment)._core.settings
    assert (settings.nic, settings.nic_bytes_per_s) == ("node7", 5e9)
    with pytest.raises(InvalidRequest, match=r"OBJECTCACHE_NIC_BYTES_PER_S must be .* 'fast'"):
        Client.from_environment(environment | {"OBJECTCACHE_NIC_BYTES_PER_S": "fast"})


@pytest.mark.parametrize(
    ("more", "route"),
    [
        ({}, "relay:fetcher"),
        ({"OBJECTCACHE_ROUTE": "direct"}, "direct"),
        ({"OBJECTCACHE_RELAYS": "d0=http://h:7400"}, "relay:fetcher"),
        ({"OBJECTCACHE_RELAYS": "d0=http://h:7400", "OBJECTCACHE_ROUTE": "relay:d0"}, "relay:d0"),
    ],
)
def test_a_fetcher_is_the_route_where_no_other_is_named(more: dict[str, str], route: str) -> None:
    environment = {
        "OBJECTCACHE_ENDPOINT": NOWHERE,
        "OBJECTCACHE_ACCESS_KEY": "key",
        "OBJECTCACHE_SECRET_KEY": "secret",
        "OBJECTCACHE_FETCHER": "http://127.0.0.1:7410",
    }
    with Client.from_environment(environment | more) as client:
        assert client._routes is not None
        assert str(client._routes.settings.route) == route
        assert client._routes.settings.relays[-1].node == "fetcher"
    with pytest.raises(InvalidRequest, match=r"^.*fetcher: .*"):
        Client.from_environment(environment | {"OBJECTCACHE_FETCHER": "127.0.0.1:7410"})


def test_the_environment_names_relays_and_a_route() -> None:
    environment = {
        "OBJECTCACHE_ENDPOINT": NOWHERE,
        "OBJECTCACHE_ACCESS_KEY": "key",
        "OBJECTCACHE_SECRET_KEY": "secret",
        "OBJECTCACHE_RELAYS": "d0=http://h:7400, http://i:7400",
        "OBJECTCACHE_ROUTE": "relay:d0",
        "OBJECTCACHE_NODE": "p0",
    }
    with Client.from_environment(environment) as client:
        assert client._routes is not None
        settings = client._routes.settings
        assert [one.node for one in settings.relays] == ["d0", "i:7400"]
        assert (str(settings.route), settings.node) == ("relay:d0", "p0")
    with pytest.raises(InvalidRequest, match="needs relays"):
        Client.from_environment(environment | {"OBJECTCACHE_RELAYS": ""})
