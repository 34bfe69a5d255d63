"""Where the admin API listens and logs, by its settings."""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from objectcache_gateway.admin.__main__ import (
    admin_address,
    audit_file,
    listeners_of,
    main,
    warn_of_plain_text,
)
from objectcache_runtime.settings import Settings, load_settings
from objectcache_schemas.errors import InvalidRequest, Unavailable


def settings_of(*assignments: str) -> Settings:
    return load_settings(None, {}, ["server.data_dir=/data", *assignments])


@pytest.mark.parametrize(
    ("assignments", "address"),
    [
        ((), "127.0.0.1:9001"),
        (("gateway.listen=0.0.0.0:8000",), "127.0.0.1:8001"),
        (("gateway.listen=127.0.0.1:0",), "127.0.0.1:0"),
        (("gateway.listen=127.0.0.1:65535",), "127.0.0.1:0"),
        (("admin.listen=[::1]:7000",), "[::1]:7000"),
        (("admin.listen=off",), "None"),
    ],
)
def test_auto_is_loopback_one_port_above_the_gateway(
    assignments: tuple[str, ...], address: str
) -> None:
    assert str(admin_address(settings_of(*assignments))) == address


def test_a_wrong_address_names_its_setting() -> None:
    with pytest.raises(
        InvalidRequest, match=r"admin\.listen must be host:port, auto or off, got 'here'"
    ):
        admin_address(settings_of("admin.listen=here"))


def test_a_port_in_use_costs_a_warning_with_auto_and_is_an_error_where_it_was_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with caplog.at_level(logging.WARNING):
            assert listeners_of(settings_of(f"gateway.listen=127.0.0.1:{port - 1}")) == []
        assert "admin.sock only" in caplog.text
        with pytest.raises(Unavailable, match="cannot listen"):
            listeners_of(settings_of(f"admin.listen=127.0.0.1:{port}"))


def test_plain_text_across_a_network_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    quiet = ("admin.listen=localhost:1", "admin.listen=[::1]:1", "admin.listen=off")
    with caplog.at_level(logging.WARNING):
        for assignment in quiet:
            warn_of_plain_text(settings_of(assignment))
        warn_of_plain_text(settings_of("admin.listen=0.0.0.0:1", "admin.tls_certificate=c.pem"))
        assert caplog.text == ""
        warn_of_plain_text(settings_of("admin.listen=0.0.0.0:1"))
    assert "tokens cross the network in plain text" in caplog.text


def test_the_audit_log_lies_in_the_data_directory_unless_told_otherwise() -> None:
    assert audit_file(settings_of()) == Path("/data/admin-audit.log")
    assert audit_file(settings_of("admin.audit_log=/var/log/a.log")) == Path("/var/log/a.log")


@contextmanager
def process_left_alone() -> Iterator[None]:
    """What a server's entry point sets for its process ends with the block."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    facts = logging.logThreads, logging.logProcesses, logging.logMultiprocessing
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers
        logging.logThreads, logging.logProcesses, logging.logMultiprocessing = facts
        for number, handler in signals.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(
    ("assignments", "words"),
    [
        ([f"admin.tls_key={__file__}"], "admin.tls_key is set, admin.tls_certificate is not"),
        (["admin.tls_certificate=/no/such.pem"], "admin.tls_certificate"),
        (["admin.log_level=loud"], "log_level"),
    ],
)
def test_what_cannot_be_is_refused_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], assignments: list[str], words: str
) -> None:
    flags = [part for one in assignments for part in ("--set", one)]
    with process_left_alone():
        assert main(["--data-dir", str(tmp_path), *flags]) == 2
    assert words in capsys.readouterr().err
