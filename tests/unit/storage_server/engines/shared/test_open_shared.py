"""The engine that the URL of a shared store names."""

from __future__ import annotations

import contextlib
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from objectcache_runtime.settings import Settings, load_settings
from objectcache_schemas.errors import Conflict, InvalidRequest, StorageFull, Unavailable
from objectcache_storage_server.create_store import main
from objectcache_storage_server.engines.base import Engine
from objectcache_storage_server.engines.open_engine import open_engine
from objectcache_storage_server.engines.shared.cache.cache_file import FILE_NAME
from objectcache_storage_server.engines.stores.open_store import create_store
from tests.contract.engine_suite import BUCKET, put, read


def settings_of(data_dir: Path, url: str, *more: str) -> Settings:
    given = [
        *more,
        f"storage.engine={url}",
        f"server.data_dir={data_dir}",
        "storage.index_bytes_max=64MiB",
    ]
    return load_settings(None, {}, given)


def address_in(folder: Path) -> str:
    return f"file://{folder / 'store'}"


def opened(folder: Path, server: str) -> Engine:
    return open_engine(settings_of(folder / server, address_in(folder)))


def test_a_new_server_makes_no_store_and_says_what_makes_one(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()  # as below a mount point
    command = rf"objectcache create-store '{re.escape(address_in(tmp_path))}'"
    for _ in range(2):
        with pytest.raises(Unavailable, match=command):
            opened(tmp_path, "a")
    assert list((tmp_path / "store").iterdir()) == []
    create_store(address_in(tmp_path))
    opened(tmp_path, "a").close()


def test_a_store_is_made_once(tmp_path: Path) -> None:
    create_store(address_in(tmp_path))
    with contextlib.closing(opened(tmp_path, "a")) as first:
        first.create_bucket(BUCKET)
        with pytest.raises(Conflict, match="nothing was made"):
            create_store(address_in(tmp_path))
        put(first, "key", b"data")
        with contextlib.closing(opened(tmp_path, "b")) as second:
            assert read(second, "key") == b"data"


def test_of_those_who_make_a_store_at_once_one_has_made_it(tmp_path: Path) -> None:
    begin = threading.Barrier(4)

    def made(address: str) -> bool:
        begin.wait()
        try:
            create_store(address)
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(4) as threads:
        for number in range(8):
            address = f"file://{tmp_path}/{number}"
            assert sum(threads.map(made, [address] * 4)) == 1


def test_the_command_makes_a_store_or_says_why_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([address_in(tmp_path)]) == 0
    assert address_in(tmp_path) in capsys.readouterr().out
    assert main([address_in(tmp_path)]) == 1
    assert "there is a store" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main([f"file://{tmp_path}/file/store"]) == 1
    assert main(["tape://store"]) == 2
    assert "file:///PATH" in capsys.readouterr().err


def test_servers_with_the_url_of_one_folder_have_one_store(tmp_path: Path) -> None:
    create_store(address_in(tmp_path))
    with contextlib.ExitStack() as stack:
        first, second = (
            stack.enter_context(contextlib.closing(opened(tmp_path, name))) for name in ("a", "b")
        )
        first.create_bucket(BUCKET)
        put(first, "key", b"data")
        assert read(second, "key") == b"data"
        assert first.capabilities.name == "shared-folder"
    with contextlib.closing(opened(tmp_path, "a")) as again:
        assert read(again, "key") == b"data"


def test_a_store_that_a_server_has_seen_is_not_made_anew(tmp_path: Path) -> None:
    create_store(address_in(tmp_path))
    opened(tmp_path, "a").close()
    shutil.rmtree(tmp_path / "store")
    (tmp_path / "store").mkdir()
    with pytest.raises(Unavailable) as gone:
        opened(tmp_path, "a")
    assert "create-store" not in str(gone.value)  # it was made: something else is wrong
    create_store(address_in(tmp_path))
    opened(tmp_path, "b").close()
    with pytest.raises(Unavailable):
        opened(tmp_path, "a")


def test_a_data_directory_is_one_servers_alone(tmp_path: Path) -> None:
    create_store(address_in(tmp_path))
    with contextlib.closing(opened(tmp_path, "a")):
        with pytest.raises(Unavailable, match="in use by another storage server"):
            opened(tmp_path, "a")
        opened(tmp_path, "b").close()
    opened(tmp_path, "a").close()


@pytest.mark.parametrize("engine", ["tape", "http://host/x", "rados://", "file:/folder"])
def test_what_is_no_engine_and_no_store_is_told_what_there_is(tmp_path: Path, engine: str) -> None:
    with pytest.raises(InvalidRequest, match="rados://, s3://, daos:// or file://"):
        settings_of(tmp_path, engine)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["storage.grace_s=600", "storage.delivery_timeout_s=600"], "storage.grace_s"),
        (["storage.low_watermark=0.9", "storage.high_watermark=0.8"], "storage.low_watermark"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    tmp_path: Path, given: list[str], named: str
) -> None:
    settings = settings_of(tmp_path / "a", address_in(tmp_path), *given)
    with pytest.raises(InvalidRequest, match=named):
        open_engine(settings)
    assert not (tmp_path / "a").exists()


def test_the_settings_reach_the_upkeep(tmp_path: Path) -> None:
    given = ["storage.capacity_bytes=1MiB", "storage.grace_s=700", "storage.when_full=refuse"]
    create_store(address_in(tmp_path))
    settings = settings_of(tmp_path / "a", address_in(tmp_path), *given)
    with contextlib.closing(open_engine(settings)) as engine:
        assert engine.status().capacity_bytes == 1 << 20
        assert engine.status().when_full == "refuse"
        with pytest.raises(StorageFull, match="capacity_bytes"):
            engine.check_room((1 << 20) + 1)


@pytest.mark.parametrize("engine", ["local", "files"])
def test_an_engine_of_one_server_says_what_the_data_directory_is(
    tmp_path: Path, engine: str
) -> None:
    create_store(address_in(tmp_path))
    opened(tmp_path, "a").close()
    there = sorted(tmp_path.glob("a/**/*"))
    given = [f"storage.engine={engine}", f"server.data_dir={tmp_path / 'a'}"]
    with pytest.raises(Unavailable, match="of a server of a shared store"):
        open_engine(load_settings(None, {}, given))
    assert sorted(tmp_path.glob("a/**/*")) == there


@pytest.mark.parametrize("inner", ["a/store", "a", "link/store"])
def test_a_store_in_the_data_directory_of_its_server_is_refused(tmp_path: Path, inner: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("a")
    address = f"file://{tmp_path / inner}"
    create_store(address)  # nobody knows yet
    with pytest.raises(InvalidRequest, match="one in the other"):
        open_engine(settings_of(tmp_path / "a", address))
    with pytest.raises(InvalidRequest, match="one in the other"):
        open_engine(settings_of(tmp_path / inner / "deeper", address))


def test_no_store_is_made_in_a_data_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    create_store(address_in(tmp_path))
    opened(tmp_path, "a").close()
    for inner in ("a", "a/store", "a/deep/store"):
        assert main([f"file://{tmp_path / inner}"]) == 2
        assert f"the data directory {tmp_path / 'a'} of a server" in capsys.readouterr().err
    assert not (tmp_path / "a" / "store").exists()


def test_nobody_else_reads_a_data_directory(tmp_path: Path) -> None:
    create_store(address_in(tmp_path))
    opened(tmp_path, "a").close()
    files = [path for path in tmp_path.glob("a/**/*") if path.is_file()]
    assert {"store", "whole"} <= {path.name for path in files}
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


def test_a_cache_lies_in_the_data_directory_or_where_it_is_said(tmp_path: Path) -> None:
    create_store(address_in(tmp_path))
    elsewhere = ["storage.cache_bytes=8MiB", f"storage.cache_dir={tmp_path / 'device'}"]
    for number, given in enumerate((["storage.cache_bytes=8MiB"], elsewhere, [])):
        folder = tmp_path / f"{number}"
        settings = settings_of(folder, address_in(tmp_path), *given)
        with contextlib.closing(open_engine(settings)) as engine:
            shared = engine.status().shared
            assert shared is not None
            has_cache = shared.cache is not None
        assert has_cache == bool(given)
        assert (folder / "cache" / FILE_NAME).exists() == (number == 0)
    assert (tmp_path / "device" / FILE_NAME).stat().st_size == 8 << 20


@pytest.mark.parametrize("engine", ["local", "files", "memory"])
def test_a_cache_is_for_a_shared_store(tmp_path: Path, engine: str) -> None:
    settings = settings_of(tmp_path / "a", engine, "storage.cache_bytes=8MiB")
    with pytest.raises(InvalidRequest, match=r"storage\.cache_bytes"):
        open_engine(settings)


def test_a_cache_smaller_than_an_object_of_the_store_is_refused(tmp_path: Path) -> None:
    create_store(address_in(tmp_path))
    settings = settings_of(tmp_path / "a", address_in(tmp_path), "storage.cache_bytes=1MiB")
    with pytest.raises(InvalidRequest, match="4194304"):
        open_engine(settings)
    opened(tmp_path, "a").close()
