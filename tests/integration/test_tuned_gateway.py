"""Settings that only a running gateway shows."""

from __future__ import annotations

import base64
import datetime
import zlib
from collections.abc import Iterator
from pathlib import Path

import botocore.auth
import pytest

from tests.integration.served import wait_until
from tests.s3_clients import call, open_socket, receive_answer, send_head
from tests.servers import RunningServer, standing_still, start_server

SETTINGS = (
    "storage.engine=memory",
    "limits.xml_body_bytes_max=1000",
    "gateway.keepalive_timeout_s=0.2",
    "gateway.clock_skew_s=10",
    "gateway.virtual_host_domains=s3.example,other.example",
)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with start_server(tmp_path_factory.mktemp("tuned"), *SETTINGS) as running:
        yield running


def test_an_idle_connection_is_closed_after_keepalive_timeout_s(tuned: RunningServer) -> None:
    with open_socket(tuned) as connection:
        send_head(connection, "GET", "/healthz", {"Host": "x"})
        assert receive_answer(connection).headers["Connection"] is None
        assert connection.recv(1) == b""  # the default would outlast this socket's own timeout


@pytest.mark.parametrize("late_s", [-30, 30])
def test_a_request_of_another_time_than_clock_skew_s_allows_is_refused(
    server: RunningServer, tuned: RunningServer, monkeypatch: pytest.MonkeyPatch, late_s: int
) -> None:
    at = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=late_s)
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda: at)
    assert call(server, "GET", "/").status == 200  # within the default
    refused = call(tuned, "GET", "/")
    assert (refused.status, refused.code) == (403, "RequestTimeTooSkewed")


def test_a_storage_server_that_is_silent_for_storage_timeout_s_is_unavailable(
    tmp_path: Path,
) -> None:
    settings = ("storage.engine=memory", "gateway.storage_timeout_s=1")
    with start_server(tmp_path, *settings) as server:
        with standing_still(server.storage_pid):
            assert call(server, "GET", "/").status == 503
        # A busy machine, too, may take longer than that for an answer.
        wait_until(lambda: call(server, "GET", "/").status == 200, "an answer in time")


def test_a_bucket_is_named_by_a_host_of_virtual_host_domains(tuned: RunningServer) -> None:
    assert call(tuned, "PUT", "/named").status == 200
    for domain in ("s3.example", "other.example"):
        assert call(tuned, "PUT", "/key", b"data", host=f"named.{domain}").status == 200
    assert call(tuned, "GET", "/named/key").body == b"data"
    assert call(tuned, "GET", "/key", host="named.localhost").status == 404  # no domain of these


@pytest.mark.parametrize(("keys", "status"), [(1, 200), (100, 400)])
def test_a_document_over_xml_body_bytes_max_is_refused(
    tuned: RunningServer, keys: int, status: int
) -> None:
    call(tuned, "PUT", "/documents")
    objects = "".join(f"<Object><Key>{index}</Key></Object>" for index in range(keys))
    document = f"<Delete>{objects}</Delete>".encode()
    checksum = base64.b64encode(zlib.crc32(document).to_bytes(4, "big")).decode()
    answer = call(tuned, "POST", "/documents?delete", document, {"x-amz-checksum-crc32": checksum})
    assert answer.status == status, answer.body
