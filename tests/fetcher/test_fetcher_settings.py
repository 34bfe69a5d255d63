"""A fetcher says which of its settings is wrong, and keeps to those that are not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from objectcache_relay.fetcher.__main__ import main
from tests.fetcher.fetchers import RunningFetcher
from tests.servers import RunningServer

UNUSABLE = max(os.sched_getaffinity(0)) + 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ((), "server.run_dir is not set"),
        (("fetcher.workers=0",), "fetcher.workers must be"),
        (("fetcher.workers=two",), "fetcher.workers must be"),
        (("fetcher.cpus=0,one",), "fetcher.cpus must be numbers of processors, 0 to 4095"),
        ((f"fetcher.cpus={UNUSABLE}",), f"fetcher.cpus: this process may not use {UNUSABLE}"),
        (("fetcher.users=root",), "fetcher.users must be numbers of users"),
        (("fetcher.listen=7410",), "fetcher.listen must be host:port"),
        (("fetcher.listen=0.0.0.0:0",), "fetcher.listen is 0.0.0.0:0"),
        (("fetcher.encodings=planes-zstd,lz4",), "fetcher.encodings must be auto, or some of"),
        (("fetcher.encodings=auto,planes-zstd",), "or none, got 'auto'"),
        (("fetcher.encoding=planes-zstd",), "no setting is called fetcher.encoding"),
        (
            ("relay.landing_bytes=9TiB",),
            "relay.landing_bytes is 9895604649984, and",
        ),
        (("relay.endpoint=",), "relay.endpoint is not set"),
        (("relay.endpoint=ftp://x",), "relay.endpoint 'ftp://x' must be http://host:port"),
        (("relay.landing_bytes=64KiB",), "relay.landing_bytes must be"),
        (("relay.node=fetcher",), "relay.node must not be 'fetcher'"),
        (
            ("fetcher.users=65534",),
            "fetcher.users names user 65534, who cannot reach the socket with "
            "storage.target_socket_mode=600: set storage.target_socket_mode=666",
        ),
    ],
)
def test_a_wrong_setting_is_named(
    settings: tuple[str, ...],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OBJECTCACHE_ACCESS_KEY", "KEY")
    monkeypatch.setenv("OBJECTCACHE_SECRET_KEY", "not to be shown")
    every = ("relay.endpoint=http://127.0.0.1:1", *settings)
    assert main([part for one in every for part in ("--set", one)]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "not to be shown" not in said


def test_a_fetcher_has_the_jobs_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OBJECTCACHE_ACCESS_KEY", raising=False)
    assert main(["--set", "relay.endpoint=http://127.0.0.1:1"]) == 2
    assert "a fetcher has the job's access key" in capsys.readouterr().err


def test_what_has_no_effect_and_whom_the_directory_keeps_out_is_told(
    server: RunningServer, tmp_path: Path
) -> None:
    log = tmp_path / "fetcher.log"
    settings = (
        *("relay.listen=127.0.0.1:7", "relay.wait_s=0.1"),
        *("fetcher.users=65534", "storage.target_socket_mode=666"),
    )
    with RunningFetcher(server, log, *settings) as fetcher:
        said = log.read_text()
        assert "relay.listen is set, and has no effect on a fetcher" in said
        assert "relay.wait_s" not in said
        assert f"cannot enter server.run_dir {fetcher.run_dir}" in said


def test_workers_are_as_many_as_is_set_and_know_no_secret(
    server: RunningServer, tmp_path: Path
) -> None:
    cpu = min(os.sched_getaffinity(0))
    settings = ("fetcher.workers=3", f"fetcher.cpus={cpu}")
    with RunningFetcher(server, tmp_path / "fetcher.log", *settings) as fetcher:
        assert [worker.cpu_affinity() for worker in fetcher.workers] == [[cpu]] * 3
        for worker in fetcher.workers:
            assert not [name for name in worker.environ() if name.startswith("OBJECTCACHE_")]
            assert worker.num_threads() == 1
