"""The admin audit log: who changed what, and never a secret."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from objectcache_gateway.admin.api import ROUTES
from objectcache_gateway.admin.serving.change_audit import (
    LEFT_OUT,
    LINE_BYTES_MAX,
    SECRET_FIELDS,
    ChangeAudit,
    audit_line,
    without_secrets,
)
from objectcache_schemas.operators.admin_api import BackupRequest, NewKey, NewUser, Pins

SECRET = "correct-horse-battery"


def line_of(**changes: Any) -> Any:
    values: dict[str, Any] = {
        "now_s": 1_800_000_000.25,
        "request_id": "R1",
        "who": "token ci (abc)",
        "origin": "127.0.0.1",
        "method": "PATCH",
        "path": "/v1/users/{name}",
        "names": {"name": "alice"},
        "asked": {"enabled": False},
        "status": 200,
        "code": "",
    }
    data = audit_line(**values | changes)
    assert data.endswith(b"\n")
    assert data.count(b"\n") == 1
    return json.loads(data)


def test_a_line_says_who_did_what_from_where_and_how_it_ended() -> None:
    line = line_of()
    assert line["time"] == "2027-01-15T08:00:00.250Z"
    assert (line["who"], line["from"]) == ("token ci (abc)", "127.0.0.1")
    assert line["action"] == "PATCH /v1/users/{name}"
    assert line["names"] == {"name": "alice"}
    assert line["asked"] == {"enabled": False}
    assert (line["status"], line["code"]) == (200, "")


def test_names_that_steer_a_terminal_stay_on_their_line() -> None:
    data = audit_line(
        now_s=0.0, request_id="R", who="root", origin="x", method="DELETE", path="/v1/keys/{k}",
        names={"k": "a\nb\x1b[31m"}, asked={}, status=404, code="NoSuchEntity",
    )  # fmt: skip
    assert data.count(b"\n") == 1
    assert b"\x1b" not in data


def test_a_long_line_is_cut_to_what_matters() -> None:
    asked = {"keys": ["k" * 1000] * 100}
    line = line_of(asked=asked)
    assert line["asked"] == {"cut": True}
    assert line["who"] == "token ci (abc)"
    assert len(json.dumps(line)) < LINE_BYTES_MAX


@pytest.mark.parametrize(
    "body",
    [
        NewUser(name="alice", access_key="AKIA", secret_key=SECRET),
        NewKey(user="alice", secret_key=SECRET),
        BackupRequest(passphrase=SECRET),
    ],
)
def test_secrets_of_a_body_are_left_out(body: Any) -> None:
    assert SECRET not in json.dumps(without_secrets(body))
    assert LEFT_OUT in json.dumps(without_secrets(body))


def test_what_is_no_secret_stays() -> None:
    assert without_secrets(Pins(keys=("a",), pinned=True)) == {"keys": ["a"], "pinned": True}
    assert without_secrets(NewUser(name="alice"))["secret_key"] is None


def test_every_field_that_sounds_like_a_secret_is_known_as_one() -> None:
    for route in ROUTES:
        for field in msgspec.structs.fields(route.body):
            if any(word in field.name for word in ("secret", "pass", "token", "backup")):
                assert field.name in SECRET_FIELDS, (route, field)


def test_lines_are_appended_and_a_renamed_file_is_begun_anew(tmp_path: Path) -> None:
    file = tmp_path / "audit.log"
    log = ChangeAudit(file, 1 << 20, 2)
    log.write(b"one\n")
    file.rename(tmp_path / "audit.log.old")
    log.write(b"two\n")
    log.close()
    assert (tmp_path / "audit.log.old").read_bytes() == b"one\n"
    assert file.read_bytes() == b"two\n"
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_line_that_cannot_be_written_is_logged_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = ChangeAudit(tmp_path / "absent" / "audit.log", 1 << 20, 2)
    with caplog.at_level(logging.ERROR):
        log.write(b"secret\n")
    assert log.lost_lines == 1
    assert "cannot be written" in caplog.text
    assert "1 lines are lost" in caplog.text
    assert "secret" not in caplog.text
