"""The benchmark's load generator: its requests are ones that servers take, and it counts right."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks.s3.request_load import Load, prepared, run
from tests.s3_clients import call
from tests.servers import RunningServer

SIZE_BYTES = 4096


def load(server: RunningServer, bucket: str, method: str, *, key_count: int = 5) -> Load:
    return Load(
        host=server.host,
        port=server.port,
        access_key=server.credentials.access_key,
        secret_key=server.credentials.secret_key,
        method=method,
        bucket=bucket,
        prefix="object",
        key_count=key_count,
        body_bytes=SIZE_BYTES,
        connections=3,
        duration_s=0.0,
        count_min=30,
    )


def test_what_it_puts_is_what_it_gets(server: RunningServer, bucket: str) -> None:
    puts = load(server, bucket, "PUT")
    stored = run(puts, prepared(puts))
    assert stored.count >= 30
    assert stored.failed == 0
    assert call(server, "GET", f"/{bucket}/object-000004").body == bytes(SIZE_BYTES)
    gets = load(server, bucket, "GET")
    got = run(gets, prepared(gets))
    assert got.failed == 0
    assert got.received_bytes > got.count * SIZE_BYTES
    assert 0 < got.p50_s <= got.p99_s <= got.elapsed_s


def test_answers_other_than_200_are_counted(server: RunningServer, bucket: str) -> None:
    gets = load(server, bucket, "GET")
    outcome = run(gets, prepared(gets))
    assert outcome.failed == outcome.count


def test_a_server_that_is_not_there_is_an_error(server: RunningServer, bucket: str) -> None:
    gets = load(server, bucket, "GET")
    with pytest.raises(OSError, match="refused"):
        run(msgspec.structs.replace(gets, port=1), prepared(gets))
