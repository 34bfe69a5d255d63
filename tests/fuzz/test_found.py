"""What fuzzing and the client matrix found, each as a test of its own."""

from __future__ import annotations

import logging
import socket

import pytest

from objectcache_gateway.handlers.objects.copy_objects import copy_source
from objectcache_gateway.handlers.objects.object_headers import attributes_of
from objectcache_gateway.request.addressing import Address
from objectcache_gateway.request.request_head import RequestHead
from objectcache_gateway.server import failure_level
from objectcache_runtime.networking.listening import HostPort
from objectcache_runtime.settings import load_settings
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.layout import KvLayout
from objectcache_schemas.messages.frames import LENGTH
from objectcache_schemas.messages.reads import ListObjects
from objectcache_storage_server.s3.list_objects import list_objects
from tests.fuzz.frame_seeds import encoded
from tests.fuzz.heads import BUCKET
from tests.fuzz.servers import Servers
from tests.s3_clients import call
from tests.storage_client import StorageClient

BAD_UTF8 = "gzi\udc95"  # as aiohttp hands over a byte that is no UTF-8


def put_head(*headers: tuple[str, str]) -> RequestHead:
    return RequestHead("PUT", "/bucket/key", "", headers)


@pytest.mark.parametrize("name", ["content-encoding", "content-type", "x-amz-meta-a"])
def test_a_header_that_would_be_stored_must_be_utf8(name: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        attributes_of(put_head((name, BAD_UTF8)))


def test_the_name_of_user_metadata_must_be_ascii() -> None:
    with pytest.raises(InvalidRequest, match="x-amz-meta-"):
        attributes_of(put_head(("x-amz-meta-\u00e9", "value")))
    assert attributes_of(put_head(("x-amz-meta-e", "value"))).user_metadata == {"e": "value"}


@pytest.mark.parametrize("data", [b"\x81\xa5dty\xffe\xa1f", b"\x91" * 5000, b""])
def test_a_layout_that_is_no_msgpack_map_of_text_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="KV layout"):
        KvLayout.from_bytes(data)


@pytest.mark.parametrize(
    ("header", "key"),
    [
        ("/bucket/a+b", "a b"),  # as s5cmd writes it, and S3 reads it
        ("/bucket/a%20b", "a b"),
        ("/bucket/a%2Bb", "a+b"),
        ("bucket/%2F+%25", "/ %"),
    ],
)
def test_a_plus_sign_in_a_copy_source_is_a_space(header: str, key: str) -> None:
    assert copy_source(header) == Address("bucket", key)


def test_a_setting_that_is_not_utf8_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="a flag"):
        load_settings(None, {}, ["storage.high_watermark=0.\udcf6"])


@pytest.mark.parametrize("port", ["9" * 5000, "65536", "-1", "\u0663", ""])
def test_a_port_that_is_none_is_refused(port: str) -> None:
    with pytest.raises(InvalidRequest, match=r"gateway\.listen"):
        HostPort.parse("gateway.listen", f"localhost:{port}")


def test_what_is_not_served_is_no_warning_in_the_log(servers: Servers) -> None:
    """A client could fill the log; the access log has each."""
    log = servers.running.data_dir / "gateway.log"
    before = log.read_text("utf-8")
    for path in (f"/{BUCKET}/k?retention", f"/{BUCKET}?website"):
        assert call(servers.running, "PUT", path).status == 501
    assert log.read_text("utf-8") == before  # gateway.log_level is warning here


@pytest.mark.parametrize(
    ("status", "level"),
    [(500, "WARNING"), (501, "INFO"), (502, "WARNING"), (503, "INFO"), (507, "WARNING")],
)
def test_only_what_the_server_failed_at_is_a_warning(status: int, level: str) -> None:
    assert logging.getLevelName(failure_level(status)) == level


def test_an_expected_owner_without_a_bucket_is_no_defect(servers: Servers) -> None:
    running = servers.running
    for method, path in (("GET", "/"), ("POST", "/?kv-session")):
        answer = call(running, method, path, headers={"x-amz-expected-bucket-owner": "nobody"})
        assert answer.status == 200, answer
    refused = call(running, "GET", f"/{BUCKET}", headers={"x-amz-expected-bucket-owner": "nobody"})
    assert refused.code == "AccessDenied"


def test_a_listing_of_less_than_nothing_is_empty() -> None:
    page = list_objects(ListObjects(bucket="b", limit=-1), lambda *_: [])
    assert (page.objects, page.common_prefixes) == ((), ())


def test_a_record_that_checks_itself_is_no_message_and_no_defect(servers: Servers) -> None:
    layout = {
        "num_layers": -1,
        "chunk_tokens": 1,
        "per_layer_chunk_bytes": 1,
        "dtype": "f",
        "fingerprint": "f",
    }
    before = servers.readings()
    with StorageClient(servers.running.run_dir / "storage.sock") as client:
        client.socket.sendall(encoded({"op": "SetLayout", "bucket": "b", "layout": layout}))
        with pytest.raises(EOFError):
            client.receive_bytes(1)
    assert servers.defects(before) == []


def test_a_client_that_has_not_joined_cannot_fill_memory(servers: Servers) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(servers.running.run_dir / "targets.sock"))
        client.settimeout(20)
        client.sendall(LENGTH.pack(60 << 20))
        answer = client.recv(4096)
    assert b"at most 65536 are allowed" in answer


def test_a_head_that_trickles_is_cut(servers: Servers) -> None:
    with socket.create_connection((servers.running.host, servers.running.port), 20) as client:
        client.settimeout(1)
        client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n")
        answer = bytearray()
        for _ in range(20):  # gateway.keepalive_timeout_s is 2 here
            try:
                client.sendall(b"x-slow: y\r\n")
                data = client.recv(4096)
            except TimeoutError:
                continue
            except ConnectionError:
                break
            if not data:
                break
            answer += data
        else:
            pytest.fail("the connection was never cut")
    assert b" 200 " not in answer
