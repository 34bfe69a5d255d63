"""Lines of the log: structured, bounded, on one line each, and without credentials."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from types import TracebackType

import pytest

from objectcache_runtime.logs import (
    LINE_BYTES_MAX,
    TEXT_LENGTH_MAX,
    JsonLines,
    TextLines,
    fields_of,
    log_fields,
    log_level,
    set_log_level,
    utc_time,
)
from objectcache_schemas.errors import InvalidRequest

Raised = tuple[type[BaseException], BaseException, TracebackType | None]


def record_of(message: str, raised: Raised | None = None) -> logging.LogRecord:
    record = logging.LogRecord("objectcache.test", logging.WARNING, "", 0, message, None, raised)
    record.created = 1_700_000_000.25
    return record


@pytest.fixture
def root_level() -> Iterator[None]:
    """The level is put back after the test."""
    before = logging.getLogger().level
    yield
    logging.getLogger().setLevel(before)


def test_a_json_line_has_stable_names() -> None:
    record = record_of("it happened")
    record.fields = {"status": 200, "bucket": "b"}
    assert json.loads(JsonLines("gateway-0").format(record)) == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "warning",
        "logger": "objectcache.test",
        "process": "gateway-0",
        "message": "it happened",
        "status": 200,
        "bucket": "b",
    }


def test_a_text_line_says_the_same() -> None:
    record = record_of("it happened")
    record.fields = {"status": 200, "key": "a\nb"}
    assert TextLines("storage").format(record) == (
        "2023-11-14T22:13:20.250Z WARNING storage objectcache.test: it happened "
        "status=200 key=a\\nb"
    )


@pytest.mark.parametrize("lines", [JsonLines("p"), TextLines("p")], ids=["json", "text"])
@pytest.mark.parametrize(
    "text",
    ["a\nb\r\x1b[31m\x00\x7f", "\x85\u2028\u202e", "\udc80 is no text", "ü is fine"],
    ids=["control", "unicode control", "surrogate", "printable"],
)
def test_no_line_holds_a_control_character(lines: logging.Formatter, text: str) -> None:
    record = record_of(text)
    record.fields = {"key": "fields are short and clean"}
    line = lines.format(record)
    assert line.isprintable()
    assert line.encode()  # surrogates would have no encoding
    assert ("ü" in line) == ("ü" in text)


@pytest.mark.parametrize("lines", [JsonLines("p"), TextLines("p")], ids=["json", "text"])
def test_a_line_is_bounded_and_says_what_was_cut(lines: logging.Formatter) -> None:
    long = lines.format(record_of("x" * 1_000_000))
    assert len(long) < TEXT_LENGTH_MAX + 300
    assert "(1000000 characters)" in long
    record = record_of("many fields")
    record.fields = {f"field-{number}": "y" * 1000 for number in range(100)}
    assert len(lines.format(record)) <= LINE_BYTES_MAX


def test_a_json_line_that_is_cut_is_still_json() -> None:
    record = record_of("many fields")
    record.fields = {f"field-{number}": "y" * 1000 for number in range(100)}
    line = json.loads(JsonLines("p").format(record))
    assert (line["message"], line["cut"]) == ("many fields", True)


@pytest.mark.parametrize("lines", [JsonLines("p"), TextLines("p")], ids=["json", "text"])
@pytest.mark.parametrize(
    "secret_in",
    [
        "GET /b/k?X-Amz-Signature={}&X-Amz-Expires=60",
        "GET /b/k?x-amz-security-token={}",
        "Authorization: Bearer {}",
        "Authorization Bearer {}",
        "signature {}" + "0" * 8,
        "'authorization': 'AWS4-HMAC-SHA256 Credential={}/20260101/us-east-1/s3/aws4_request'",
        "Signature={}",
        'b"X-Amz-Credential={}%2F2026"',
    ],
)
def test_what_looks_like_a_credential_is_left_out(lines: logging.Formatter, secret_in: str) -> None:
    line = lines.format(record_of(secret_in.format("SECRETSECRET")))
    assert "SECRETSECRET" not in line
    assert "left out" in line


@pytest.mark.parametrize(
    "said",
    [
        "SignatureDoesNotMatch: the signature does not match; check the secret key",
        "no credential was found; authorization failed, and no security-token came",
    ],
)
def test_what_is_said_of_a_credential_is_logged_as_it_is(said: str) -> None:
    assert json.loads(JsonLines("p").format(record_of(said)))["message"] == said


def test_a_traceback_stands_in_the_line_and_keeps_its_end() -> None:
    try:
        raise ValueError("z" * 20_000 + " and the end")
    except ValueError:
        raised = sys.exc_info()
    assert raised[0] is not None
    line = json.loads(JsonLines("p").format(record_of("failed", raised)))
    assert line["error"].startswith("Traceback (most recent call last)")
    assert line["error"].endswith("and the end")
    assert "\n" not in TextLines("p").format(record_of("failed", raised))


def test_fields_are_logged_from_the_level_up(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("objectcache.test.fields")
    with caplog.at_level(logging.WARNING, logger.name):
        log_fields(logger, logging.INFO, "quiet", {"a": 1})
        log_fields(logger, logging.WARNING, "loud", {"a": 2})
    (record,) = caplog.records
    assert (record.getMessage(), fields_of(record)) == ("loud", {"a": 2})


@pytest.mark.usefixtures("root_level")
def test_a_level_is_one_of_four_words() -> None:
    for word in ("debug", "info", "warning", "error"):
        set_log_level(word)
        assert log_level() == word
    for word in ("", "INFO", "critical", "x" * 100):
        with pytest.raises(InvalidRequest, match="one of debug, info, warning, error"):
            set_log_level(word)
    assert log_level() == "error"


def test_times_are_utc_with_milliseconds() -> None:
    assert utc_time(0.0) == "1970-01-01T00:00:00.000Z"
    assert utc_time(1_700_000_000.9996) == "2023-11-14T22:13:20.999Z"
