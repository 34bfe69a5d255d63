"""A pytest plugin that runs inside of the suite: what each test came to and what it was answered.

It is loaded by its file name into another environment, so it imports nothing of ours. Each test
adds one JSON line to $S3_TESTS_RECORD. Every HTTP answer passes `HTTPResponse.begin`, whichever
library asked, so the statuses are those of the wire and not those of some log.
"""

from __future__ import annotations

import http.client
import json
import os
from collections import Counter
from collections.abc import Generator
from typing import Any

import botocore.auth
import pytest

MESSAGE_CHARS_MAX = 400

_statuses: Counter[int] = Counter()
_outcomes: dict[str, str] = {}
_messages: list[str] = []
_begin = http.client.HTTPResponse.begin


def _counted(response: http.client.HTTPResponse) -> None:
    _begin(response)
    _statuses[response.status] += 1


http.client.HTTPResponse.begin = _counted  # type: ignore[method-assign, assignment]

# The Common Runtime is there for CRC64NVME. Where it is, botocore signs with it too, and that
# signer refuses the odd headers that the suite adds, or drops them.
botocore.auth.AUTH_TYPE_MAPS.update(
    {
        "v4": botocore.auth.SigV4Auth,
        "v4-query": botocore.auth.SigV4QueryAuth,
        "s3v4": botocore.auth.S3SigV4Auth,
        "s3v4-query": botocore.auth.S3SigV4QueryAuth,
    }
)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, None]:
    """Take note of a phase, and write the line after the last one."""
    outcome = yield
    report = outcome.get_result()
    _outcomes[report.when] = report.outcome
    if report.outcome == "failed":
        crash = getattr(report.longrepr, "reprcrash", None)
        text = crash.message if crash else str(report.longrepr)
        _messages.append(text[:MESSAGE_CHARS_MAX])
    if report.when == "teardown":
        _write(item)


def _write(item: pytest.Item) -> None:
    record = {
        "test": item.name,
        "node": item.nodeid,
        "outcome": _verdict(),
        "message": "; ".join(_messages),
        "statuses": {str(status): count for status, count in _statuses.items()},
    }
    line = json.dumps(record) + "\n"
    with open(os.environ["S3_TESTS_RECORD"], "a", encoding="utf-8") as stream:
        stream.write(line)  # one write, so that workers do not mix their lines
    _statuses.clear()
    _outcomes.clear()
    _messages.clear()


def _verdict() -> str:
    """`error` is a test that could not be judged: its preparation or its cleaning up failed."""
    if "failed" in (_outcomes.get("setup"), _outcomes.get("teardown")):
        return "error"
    call = _outcomes.get("call")
    return call if call in ("passed", "failed") else "skipped"
