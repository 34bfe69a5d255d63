"""What `servers list` and `engine status` say of a server that cannot do all that it should."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from objectcache_gateway.admin.processes.servers import server_view
from objectcache_operations.admin.status.status_view import status_view
from objectcache_operations.admin.storage.servers import server_row
from objectcache_schemas.errors import Unavailable
from objectcache_schemas.operators.engine_status import EngineStatus, SharedStatus
from objectcache_schemas.operators.server_list import Servers, ServerState


@pytest.mark.parametrize(
    ("told", "state", "lag"),
    [
        ({}, "serves", "0 records"),
        ({"lag_records": 1, "draining": True}, "draining", "1 record"),
        ({"store_failure": "no log", "lag_records": 26}, "no log", "26 records"),
        (
            {"store_failure": "no log", "lag_is_known": False, "draining": True},
            "draining; no log",
            "unknown",
        ),
    ],
)
def test_a_listed_server_serves_only_where_it_can(
    told: dict[str, Any], state: str, lag: str
) -> None:
    answering = ServerState(server_id=b"a", host_id="h", address="host:1", **told)
    row = server_row(server_view("asked", Servers(answering)))
    assert (row[0], row[1], row[-1]) == ("host:1", state, lag)


def test_a_server_that_does_not_answer_says_nothing_of_its_lag() -> None:
    row = server_row(server_view("host:1", Unavailable("it does not answer")))
    assert (row[0], row[1], row[-1]) == ("host:1", "it does not answer", "unknown")


def test_the_status_of_a_server_that_cannot_follow_says_so() -> None:
    shared = SharedStatus(log_end=7, lag_is_known=False, failure="the log takes no record")
    output = io.StringIO()
    status = EngineStatus(engine="shared-folder", shared=shared)
    Console(file=output, width=80, height=24, highlight=False).print(status_view(status))
    words = " ".join(output.getvalue().split())
    assert "degraded the log takes no record" in words
    assert "replayed up to record 7, unknown how many to replay" in words
