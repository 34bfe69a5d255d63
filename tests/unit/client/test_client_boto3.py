"""The extension as methods of boto3 clients."""

from __future__ import annotations

from typing import Any

import boto3
import botocore.session
import msgspec
import pytest
from botocore.config import Config

from objectcache.boto3_integration import core_of, register
from objectcache.errors import InvalidRequest
from tests.unit.client.client_fakes import (
    KEYS,
    LAYOUT,
    FakeGateway,
    Peer,
    Received,
    chunks_of,
    payload_of,
)


def serve(request: Received, peer: Peer) -> None:
    if "kv-session" in request.target:
        peer.answer(501, body=b"<Error><Code>NotImplemented</Code><Message>m</Message></Error>")
    elif "kv-put" in request.target:
        peer.answer(body=msgspec.msgpack.encode({"v": 1, "stored": 4, "existing": 1}))
    elif "kv-match" in request.target:
        peer.answer(body=msgspec.msgpack.encode({"v": 1, "matched": 3}))
    elif "kv-layout" in request.target:
        peer.answer(body=LAYOUT.to_bytes() if request.method == "GET" else b"")
    else:
        peer.answer_delivery("layerwise", 5, payload_of(5))


def session_of(kind: str) -> Any:
    return boto3.Session() if kind == "boto3" else botocore.session.get_session()


def s3_of(session: Any, gateway: FakeGateway, **options: Any) -> Any:
    make = getattr(session, "client", None) or session.create_client
    return make(
        "s3",
        endpoint_url=gateway.url,
        region_name="eu-test-1",
        aws_access_key_id="boto-key",
        aws_secret_access_key="boto-secret",
        aws_session_token="boto-token",
        config=Config(read_timeout=17),
        **options,
    )


@pytest.mark.parametrize("kind", ["boto3", "botocore"])
def test_clients_of_a_registered_session_have_the_methods(kind: str) -> None:
    session = session_of(kind)
    register(session)
    register(session)  # again changes nothing
    with FakeGateway(serve) as gateway:
        s3 = s3_of(session, gateway)
        assert s3.kv_match(Bucket="b", ChunkKeys=KEYS) == {"Matched": 3}
        assert s3.get_kv_layout(Bucket="b") == {"KvLayout": LAYOUT}
        s3.put_kv_layout(Bucket="b", KvLayout=LAYOUT)
        put = s3.kv_put(Bucket="b", ChunkKeys=KEYS, KvLayout=LAYOUT, Body=chunks_of(5))
        assert put == {"Stored": 4, "Existing": 1}
        answer = s3.kv_get(Bucket="b", ChunkKeys=KEYS, KvLayout=LAYOUT, Layers=(0, 3))
        with answer["Body"] as delivery:
            assert delivery.wait().tobytes() == payload_of(5)
        assert (answer["ChunkCount"], answer["Transport"]) == (5, "body")
        assert (answer["Path"], answer["RateBytesPerSecond"]) == (None, None)
        assert answer["WindowSource"] is None
        hints = {"ContextTokens": 100, "Model": "m", "RateBytesPerSecond": 5e6, "Path": "agg"}
        s3.kv_get(Bucket="b", ChunkKeys=KEYS, KvLayout=LAYOUT, **hints)["Body"].close()
        asked = gateway.requests[-1]
        assert asked.headers["x-objectcache-path"] == "agg"
        assert (asked.descriptor.context_tokens, asked.descriptor.model) == (100, "m")
        assert asked.descriptor.rate_bytes_per_s == 5e6
        authorization = gateway.requests[0].headers["authorization"]
        assert "Credential=boto-key/" in authorization
        assert "/eu-test-1/s3/" in authorization
        assert gateway.requests[0].headers["x-amz-security-token"] == "boto-token"
        assert core_of(s3).settings.timeout_s == 17
        assert core_of(s3) is core_of(s3)
        core_of(s3).close()
        s3.close()


def test_other_services_and_other_sessions_are_left_alone() -> None:
    register(boto3.Session())
    session = boto3.Session()
    with FakeGateway(serve) as gateway:
        s3 = s3_of(session, gateway)
        assert not hasattr(s3, "kv_match")
        s3.close()
        register(session)
        sts = session.client("sts", region_name="eu-test-1")
        assert not hasattr(sts, "kv_match")
        sts.close()


def test_a_client_without_credentials_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("botocore.session.Session.get_credentials", lambda self: None)
    session = boto3.Session()
    register(session)
    with FakeGateway(serve) as gateway:
        s3 = session.client("s3", endpoint_url=gateway.url, region_name="us-east-1")
        with pytest.raises(InvalidRequest, match="no credentials"):
            s3.kv_match(Bucket="b", ChunkKeys=KEYS)
        s3.close()
