"""What a client says of a delivery in headers is taken only in its own form."""

from __future__ import annotations

import pytest

from objectcache_gateway.request.delivery_headers import (
    check_plain_get,
    client_seconds,
    forced_path,
    traceparent,
)
from objectcache_gateway.request.request_head import RequestHead
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.messages.request_labels import adopted_request_id

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


def head(name: str, text: str | None) -> RequestHead:
    return RequestHead("GET", "/b/k", "", () if text is None else ((name, text),))


@pytest.mark.parametrize("text", ["a", "0123456789ABCDEF", "trace-7_b.c", "x" * 64])
def test_a_plain_word_is_adopted_as_the_request_id(text: str) -> None:
    assert adopted_request_id(text) == text


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "x" * 65,
        "a b",
        "a\n",
        "a\nGET 200 forged",
        "<a>",
        "id=1",
        "ü",
        "٣",
        "a\udcff",
        "%0a",
    ],
)
def test_anything_else_is_not_adopted(text: str | None) -> None:
    assert adopted_request_id(text) is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0.0),
        ("1.5", 1.5),
        ("0.000123456", 0.000123456),
        ("3600", 3600.0),
        ("3600.1", 0.0),
        ("9999", 0.0),
        ("-1", 0.0),
        ("1e3", 0.0),
        ("nan", 0.0),
        ("inf", 0.0),
        ("1.", 0.0),
        (".5", 0.0),
        ("1_0", 0.0),
        ("٣", 0.0),
        (None, 0.0),
    ],
)
def test_the_clients_time_is_a_decimal_of_at_most_an_hour_or_nothing(
    text: str | None, seconds: float
) -> None:
    assert client_seconds(head("x-objectcache-client-seconds", text)) == seconds


def test_a_trace_in_the_w3c_form_is_passed_on() -> None:
    assert traceparent(head("traceparent", f"00-{TRACE}-{PARENT}-01")) == f"00-{TRACE}-{PARENT}-01"


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01-more",
        f"00-{TRACE}-{PARENT}",
        f"00-{TRACE}-{PARENT}-01\n",
        f"00-{TRACE[1:]}-{PARENT}-01",
    ],
)
def test_a_trace_in_any_other_form_is_dropped(text: str | None) -> None:
    assert traceparent(head("traceparent", text)) == ""


def test_a_forced_path_is_one_of_the_five_or_none() -> None:
    assert forced_path(head("x-objectcache-path", None)) == ""
    assert forced_path(head("x-objectcache-path", "agg")) == "agg"
    with pytest.raises(InvalidRequest, match="s3tcp, buffer, direct, batch, agg"):
        forced_path(head("x-objectcache-path", "fast"))


def test_a_plain_get_takes_s3tcp_and_no_other_path() -> None:
    check_plain_get(head("x-objectcache-path", None))
    check_plain_get(head("x-objectcache-path", "s3tcp"))
    for path in ("buffer", "direct", "batch", "agg"):
        with pytest.raises(InvalidRequest, match=f"{path} needs a descriptor"):
            check_plain_get(head("x-objectcache-path", path))
    with pytest.raises(InvalidRequest, match="must be one of"):
        check_plain_get(head("x-objectcache-path", "fast"))
