"""Answers that make no sense: who gives them is of no help, and deliveries go on."""

from __future__ import annotations

import json

import pytest

from objectcache import Client
from objectcache.routes.client_routes import LEAST_LATE
from objectcache_schemas.operators.relay_report import REPORT_PATH
from tests.dispatch_service.running import TOKEN
from tests.integration.served import wait_until
from tests.relay.relays import CHUNK_COUNT, RunningRelay
from tests.routes.answers.false_service import DEEP, NO_TEXT, false_service
from tests.routes.dispatched import wait_for_reason
from tests.routes.routed import check_delivery, fetch, routed_client
from tests.servers import RunningServer


def reserved(*counts: int, relays: int = 1) -> bytes:
    """So many chunks each, the first parts over a relay."""
    over = {"relay": "b", "relay_url": "http://127.0.0.1:9"}
    parts = [
        {**(over if number < relays else {}), "chunk_count": count}
        for number, count in enumerate(counts)
    ]
    return json.dumps({"name": "x", "parts": parts}).encode()


@pytest.mark.parametrize(
    "answer",
    [
        NO_TEXT,
        DEEP,
        b"",
        reserved(-2, CHUNK_COUNT + 2),
        reserved(CHUNK_COUNT + 2, -2),
        reserved(CHUNK_COUNT, 0),
        reserved(CHUNK_COUNT // 2, CHUNK_COUNT // 2, relays=0),
        reserved(CHUNK_COUNT // 2, CHUNK_COUNT // 2, relays=2),
        reserved(CHUNK_COUNT + 1),
    ],
)
def test_a_route_that_makes_no_sense_is_none(
    server: RunningServer, caplog: pytest.LogCaptureFixture, answer: bytes
) -> None:
    def answered(method: str, path: str) -> bytes:
        return b'{"relays":[]}' if method == "GET" else answer if path == "/v1/route" else b"{}"

    credentials = server.credentials
    with (
        false_service(answered) as url,
        Client(
            server.endpoint,
            access_key=credentials.access_key,
            secret_key=credentials.secret_key,
            transport="body",
            dispatch=url,
            dispatch_token=lambda: TOKEN,
            worker="p0.0",
            route="split",
            route_bytes_min=0,
        ) as client,
        fetch(client) as delivery,
    ):
        check_delivery(delivery)
        assert delivery.route == "direct"
    assert any(f"{url} is of no help" in one.getMessage() for one in caplog.records)


@pytest.mark.parametrize("answer", [NO_TEXT, DEEP])
def test_reports_that_make_no_sense_end_no_reading_of_them(
    server: RunningServer, relays: tuple[RunningRelay, RunningRelay], answer: bytes
) -> None:
    asked = list[str]()

    def answered(_: str, path: str) -> bytes:
        asked.append(path)
        return answer

    with (
        false_service(answered) as url,
        routed_client(server, urls=[url, relays[0].endpoint], route_bytes_min=0) as client,
    ):
        wait_for_reason(client, LEAST_LATE)  # of the other

        def is_asked_further_on() -> bool:
            """After ever longer pauses, when there are deliveries."""
            with fetch(client) as delivery:
                check_delivery(delivery)
            return asked.count(REPORT_PATH) > 2

        wait_until(is_asked_further_on, "its reports are asked for further on", 120.0)
