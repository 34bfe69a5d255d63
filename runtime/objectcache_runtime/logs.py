"""How the servers log: one bounded line a record, on standard error.

`server.log_format` json writes an object a line with `time`, `level`, `logger`, `process` and
`message`, then the record's own fields (`log_fields`), and `error` where an exception is logged.
The format text writes the same for people. No line holds a control character. What looks like a
credential is left out of messages and errors, whoever logged it; fields hold none by contract.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec

from objectcache_schemas.errors import InvalidRequest

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
WORDS = {number: word for word, number in LEVELS.items()}
LINE_BYTES_MAX = 16 << 10  # a line is written in one piece, and a pipe takes no more at once
TEXT_LENGTH_MAX = 2048  # of a message and of each field
ERROR_LENGTH_MAX = 6144  # of a traceback, its end
# What stands behind such a name with a sign between them, or is as long as no word of a sentence.
_BEHIND = r"(?:%3D|\s?[^\w\s]\W{0,3}|\s+(?=\S{20}))"
_CREDENTIAL = re.compile(
    rf"(?i)((?:x-amz-)?(?:signature|credential|security-token){_BEHIND}|"
    rf"authorization(?:{_BEHIND}|\s+(?=bearer|aws4-))(?:bearer\s+|aws4-hmac-sha256\s+)?)"
    r"[^\s&\"',;]+"
)
_HINT = re.compile(r"(?i)signature|credential|security-|authorization")


def configure_logging(process: str, level: str, log_format: str) -> None:
    """Have everything logged to standard error from `level` up, as `server.log_format` says."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(process) if log_format == "json" else TextLines(process))
    # No line names them, and a record is cheaper without.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.basicConfig(handlers=[handler], force=True)
    set_log_level(level)


def set_log_level(level: str) -> None:
    """Log from `level` up, from now on. Raises `InvalidRequest` for another word."""
    number = LEVELS.get(level)
    if number is None:
        raise InvalidRequest(f"level must be one of {', '.join(LEVELS)}, got {level[:32]!r}")
    logging.getLogger().setLevel(number)


def log_level() -> str:
    """The word for the level in force."""
    number = logging.getLogger().getEffectiveLevel()
    return next((word for word, known in LEVELS.items() if number <= known), "error")


def log_fields(
    logger: logging.Logger, level: int, message: str, fields: Mapping[str, object]
) -> None:
    """Log a message with fields that programs read: short, and never a header or a query.

    Cheaper than `Logger.log`: it does not look for its caller, whom no line names.
    """
    if logger.isEnabledFor(level):
        record = logging.LogRecord(logger.name, level, "", 0, message, None, None)
        record.fields = fields
        logger.handle(record)


class JsonLines(logging.Formatter):
    """A JSON object a record."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its newline."""
        line: dict[str, Any] = {
            "time": utc_time(record.created),
            "level": WORDS.get(record.levelno, record.levelname),
            "logger": record.name,
            "process": self._process,
            "message": clean(record.getMessage()),
        }
        line.update(fields_of(record))
        if record.exc_info:
            line["error"] = clean_error(self.formatException(record.exc_info))
        encoded = msgspec.json.encode(line)
        if len(encoded) > LINE_BYTES_MAX:
            kept = ("time", "level", "logger", "process", "message")
            encoded = msgspec.json.encode({name: line[name] for name in kept} | {"cut": True})
        text = encoded.decode()
        return text if "\x7f" not in text else text.replace("\x7f", "\\u007f")


class TextLines(logging.Formatter):
    """A line for people; a traceback follows in the same line, escaped."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its newline."""
        parts = [
            utc_time(record.created),
            record.levelname,
            self._process,
            f"{record.name}:",
            escaped(clean(record.getMessage())),
        ]
        for name, value in fields_of(record).items():
            parts.append(f"{name}={escaped(str(value))}")
        if record.exc_info:
            error = clean_error(self.formatException(record.exc_info))
            parts.append(f"error={escaped(error)}")
        return " ".join(parts)[:LINE_BYTES_MAX]


def fields_of(record: logging.LogRecord) -> Mapping[str, object]:
    """What was logged beside the message."""
    return getattr(record, "fields", {})


def utc_time(unix_s: float) -> str:
    """ISO 8601 with milliseconds, in UTC."""
    seconds, milliseconds = divmod(int(unix_s * 1000), 1000)
    return f"{_utc_second(seconds)}.{milliseconds:03d}Z"


@lru_cache(maxsize=8)
def _utc_second(unix_s: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(unix_s))


def clean(text: str, length_max: int = TEXT_LENGTH_MAX) -> str:
    """Text within its length, with what looks like a credential left out."""
    if _HINT.search(text):
        text = _CREDENTIAL.sub(r"\1(left out)", text)
    if len(text) > length_max:
        text = f"{text[:length_max]}... ({len(text)} characters)"
    return text if text.isascii() else _printable(text)


def clean_error(traceback: str) -> str:
    """A traceback's first line and its end, where what happened stands."""
    if len(traceback) > ERROR_LENGTH_MAX:
        first_line = traceback.partition("\n")[0][:TEXT_LENGTH_MAX]
        traceback = f"{first_line}\n...\n{traceback[-ERROR_LENGTH_MAX:]}"
    return clean(traceback, len(traceback))


def _printable(text: str) -> str:
    """Surrogates, which no encoding takes, and control characters past ASCII, escaped."""
    return "".join(
        character if character.isprintable() or character < "\x80" else ascii(character)[1:-1]
        for character in text
    )


def escaped(text: str) -> str:
    """Text without control characters, on one line."""
    return text if text.isprintable() else "".join(map(_escape, text))


def _escape(character: str) -> str:
    return character if character.isprintable() else ascii(character)[1:-1]
