"""The audit log of real gateways."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

import pytest

from tests.integration.served import wait_until
from tests.s3_clients import s3_client
from tests.servers import start_server

FIELD = re.compile(r'\[[^\]]*\]|"(?:[^"\\]|\\x[0-9A-F]{2})*"|[^ "]+')


def test_every_request_has_its_line_once_the_gateway_has_ended(tmp_path: Path) -> None:
    log = tmp_path / "audit.log"
    with start_server(tmp_path / "data", f"gateway.audit_log={log}") as server:
        s3 = s3_client(server)
        s3.create_bucket(Bucket="audited")
        s3.put_object(Bucket="audited", Key="a b/ü", Body=b"x" * 5000)
        s3.get_object(Bucket="audited", Key="a b/ü", Range="bytes=0-99")["Body"].read()
        url = s3.generate_presigned_url("get_object", Params={"Bucket": "audited", "Key": "a b/ü"})
        with urllib.request.urlopen(url) as response:
            response.read()
        with pytest.raises(s3.exceptions.NoSuchKey):
            s3.get_object(Bucket="audited", Key="gone")
        stranger = s3_client(server, secret_key="wrong" * 8)
        with pytest.raises(stranger.exceptions.ClientError):
            stranger.list_buckets()
        stranger.close()
        s3.close()
        server.gateway.terminate()
        secret_key = server.credentials.secret_key
    text = log.read_text("ascii")
    lines = [FIELD.findall(line) for line in text.splitlines()]
    assert {len(line) for line in lines} == {26}
    # operation, status, error code, bytes sent, object size, authentication type
    assert [(line[6], line[9], line[10], line[11], line[12], line[21]) for line in lines] == [
        ("REST.PUT.BUCKET", "200", "-", "-", "-", "AuthHeader"),
        ("REST.PUT.OBJECT", "200", "-", "-", "5000", "AuthHeader"),
        ("REST.GET.OBJECT", "206", "-", "100", "5000", "AuthHeader"),
        ("REST.GET.OBJECT", "200", "-", "5000", "5000", "QueryString"),
        ("REST.GET.OBJECT", "404", "NoSuchKey", lines[4][11], "-", "AuthHeader"),
        ("-", "403", "SignatureDoesNotMatch", lines[5][11], "-", "AuthHeader"),
    ]
    assert [line[4] for line in lines] == ["root"] * 5 + ["-"]
    assert [line[7] for line in lines[1:4]] == ["a%2520b/%25C3%25BC"] * 3
    assert {line[3] for line in lines} == {"127.0.0.1"}
    assert "X-Amz-Signature" not in text
    assert secret_key not in text


def test_a_log_that_cannot_be_written_costs_no_request(tmp_path: Path) -> None:
    settings = ("gateway.audit_log=/dev/full", "server.log_format=text")
    with start_server(tmp_path / "data", *settings) as server:
        s3 = s3_client(server)
        s3.create_bucket(Bucket="audited")
        s3.close()
        assert server.gateway.terminate() == 0
        said = (tmp_path / "data" / "gateway.log").read_text()
    (line,) = (line for line in said.splitlines() if "audit_log" in line)
    assert " ERROR gateway-0 objectcache.gateway.audit_log: gateway.audit_log cannot be " in line
    assert "(No space left on device); 1 lines are lost so far" in line


def test_lines_are_written_while_the_gateway_runs_and_the_file_is_renamed(tmp_path: Path) -> None:
    log = tmp_path / "audit.log"
    settings = (
        f"gateway.audit_log={log}",
        "gateway.audit_log_bytes_max=100",
        "gateway.audit_log_files_max=1",
    )
    renamed = log.with_name("audit.log.1")
    with start_server(tmp_path / "data", *settings) as server:
        s3 = s3_client(server)
        for _ in range(2):  # each is a batch of its own: one a second is written
            s3.list_buckets()
            wait_until(renamed.exists, "the file to be renamed")
            assert "REST.GET.SERVICE" in renamed.read_text()
            renamed.unlink()
        s3.close()
    assert not log.with_name("audit.log.2").exists()
