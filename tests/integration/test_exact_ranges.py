"""gateway.exact_ranges: who is refused a range that ends past the object, and who gets what is
there. NIXL's own plugin is asked in `tests/engines/test_nixl_obj.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.s3_clients import Answer, call, s3_client
from tests.servers import RunningServer, start_server

CPP = {
    "User-Agent": "aws-sdk-cpp/1.11.760 ua/2.1 api/S3",
    "x-amz-api-version": "2006-03-01",
    "amz-sdk-invocation-id": "8F24CB29-3972-4C7A-A5DA-1437BB225BF3",
}
BODY = b"0123456789" * 10


def read(server: RunningServer, bucket: str, span: str, headers: dict[str, str]) -> Answer:
    return call(server, "GET", f"/{bucket}/k", headers={**headers, "Range": f"bytes={span}"})


@pytest.fixture
def stored(s3: Any, bucket: str) -> str:
    s3.put_object(Bucket=bucket, Key="k", Body=BODY)
    return bucket


def test_a_range_that_ends_past_the_object_is_cut_for_clients_that_look(
    server: RunningServer, stored: str
) -> None:
    answer = read(server, stored, "90-199", {})
    assert (answer.status, answer.body) == (206, BODY[90:])
    assert answer.headers["Content-Range"] == "bytes 90-99/100"


def test_it_is_refused_to_the_sdk_that_would_take_it_for_whole(
    server: RunningServer, stored: str
) -> None:
    answer = read(server, stored, "90-199", CPP)
    assert (answer.status, answer.code) == (400, "InvalidRequest")
    message = answer.xml.findtext("Message") or ""
    assert "100 bytes" in message
    assert "gateway.exact_ranges" in message
    assert call(server, "GET", f"/{stored}/k", headers=CPP).body == BODY


@pytest.mark.parametrize(("span", "first"), [("90-99", 90), ("90-", 90), ("-10", 90), ("0-", 0)])
def test_a_range_that_names_no_end_or_one_that_is_there_is_served(
    server: RunningServer, stored: str, span: str, first: int
) -> None:
    answer = read(server, stored, span, CPP)
    assert (answer.status, answer.body) == (206, BODY[first:])


def test_a_condition_that_fails_comes_before_the_range(server: RunningServer, stored: str) -> None:
    failing = {**CPP, "If-Match": '"other"'}
    assert read(server, stored, "90-199", failing).code == "PreconditionFailed"
    changed = {**CPP, "If-Range": '"other"'}
    assert read(server, stored, "90-199", changed).body == BODY


def test_the_setting_may_refuse_it_to_all_or_to_nobody(tmp_path: Path) -> None:
    with start_server(tmp_path / "data", "gateway.exact_ranges=all") as server:
        s3 = s3_client(server)
        s3.create_bucket(Bucket="bbb")
        s3.put_object(Bucket="bbb", Key="k", Body=BODY)
        assert read(server, "bbb", "90-199", {}).status == 400
        server.restart_gateway("gateway.exact_ranges=none")
        assert read(server, "bbb", "90-199", CPP).body == BODY[90:]
        s3.close()
