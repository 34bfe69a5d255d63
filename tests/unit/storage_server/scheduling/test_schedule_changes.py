"""What an operator changed outlives the server, and a crash leaves the old or the new."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from objectcache_runtime.settings import Settings, load_settings
from objectcache_schemas.errors import InvalidRequest, StorageFull, Unavailable
from objectcache_schemas.limits import MIB
from objectcache_schemas.operators.schedule import (
    ScheduleChanges,
    ScheduleConfiguration,
    TenantShare,
)
from objectcache_storage_server.scheduling.schedule_book import TENANTS_MAX, ScheduleBook, merge

SETTINGS = (
    "scheduler.policy=equal",
    "scheduler.cap_gbps=40",
    "scheduler.margin_gbps=3",
    "scheduler.epoch_s=0.02",
    "storage.layerwise_threshold_bytes=1000",
)


def settings_in(directory: Path, *assignments: str) -> Settings:
    return load_settings(None, {}, [f"server.data_dir={directory}", *assignments])


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_in(tmp_path, *SETTINGS)


# --- what is in force ---


def test_without_changes_the_settings_are_in_force(settings: Settings) -> None:
    assert ScheduleBook(settings).configuration == ScheduleConfiguration(
        policy="equal",
        cap_gbps=40.0,
        margin_gbps=3.0,
        epoch_s=0.02,
        rates="every_epoch",
        layerwise_threshold_bytes=1000,
    )
    assert not settings.schedule_file.exists()


def test_a_change_goes_before_the_settings_and_outlives_the_server(settings: Settings) -> None:
    changes = ScheduleChanges(
        policy="stall_opt", cap_gbps=0.0, tenants={"a": TenantShare(weight=2)}
    )
    changed = ScheduleBook(settings).change(changes)
    assert changed == ScheduleConfiguration(
        policy="stall_opt",
        cap_gbps=0.0,
        margin_gbps=3.0,
        epoch_s=0.02,
        rates="every_epoch",
        layerwise_threshold_bytes=1000,
        tenants={"a": TenantShare(weight=2)},
    )
    again = ScheduleBook(settings)
    assert again.configuration == changed
    assert again.changes == changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (ScheduleChanges(cap_gbps=1e-14), "cap_gbps must be 0 for none, or from 0.001 to 100000"),
        (
            ScheduleChanges(tenants={"a": TenantShare(cap_gbps=0.0009)}),
            "a tenant's cap_gbps must be 0 for none, or from 0.001 to 100000, got 0.0009",
        ),
    ],
)
def test_a_cap_below_the_least_is_refused_and_changes_nothing(
    settings: Settings, changes: ScheduleChanges, words: str
) -> None:
    book = ScheduleBook(settings)
    before = book.configuration
    with pytest.raises(InvalidRequest, match=words):
        book.change(changes)
    assert book.configuration == before
    least = ScheduleChanges(cap_gbps=0.001, tenants={"a": TenantShare(cap_gbps=0.001)})
    assert book.change(least).cap_gbps == 0.001


def test_every_field_can_be_changed_and_reset(settings: Settings) -> None:
    book = ScheduleBook(settings)
    before = book.configuration
    book.change(ScheduleChanges(policy="kv_prop"))
    book.change(ScheduleChanges(cap_gbps=50.0))
    book.change(ScheduleChanges(margin_gbps=1.0))
    book.change(ScheduleChanges(epoch_s=1.0))
    book.change(ScheduleChanges(rates="for_life"))
    book.change(ScheduleChanges(layerwise_threshold_bytes=MIB))
    book.change(ScheduleChanges(tenants={"a": TenantShare(cap_gbps=7)}))
    assert book.configuration == ScheduleConfiguration(
        policy="kv_prop",
        cap_gbps=50.0,
        margin_gbps=1.0,
        epoch_s=1.0,
        rates="for_life",
        layerwise_threshold_bytes=MIB,
        tenants={"a": TenantShare(cap_gbps=7)},
    )
    assert book.change(ScheduleChanges(), reset=True) == before
    assert ScheduleBook(settings).configuration == before


def test_a_reset_forgets_what_was_before_it_and_keeps_what_comes_with_it(
    settings: Settings,
) -> None:
    book = ScheduleBook(settings)
    book.change(ScheduleChanges(cap_gbps=50.0, margin_gbps=9.0))
    book.change(ScheduleChanges(margin_gbps=8.0), reset=True)
    assert book.changes == ScheduleChanges(margin_gbps=8.0)


def test_tenants_are_changed_one_by_one_and_none_makes_one_like_everybody() -> None:
    a, b, other = TenantShare(weight=2), TenantShare(weight=3), TenantShare(weight=4)
    merged = merge(
        ScheduleChanges(cap_gbps=1.0, tenants={"a": a, "b": b}),
        ScheduleChanges(tenants={"a": None, "c": other, "unknown": None}),
    )
    assert merged == ScheduleChanges(cap_gbps=1.0, tenants={"b": b, "c": other})


def test_a_server_without_a_data_directory_keeps_changes_until_it_ends() -> None:
    book = ScheduleBook(Settings())
    assert book.change(ScheduleChanges(cap_gbps=5.0)).cap_gbps == 5.0


@pytest.mark.parametrize(
    ("tenants", "words"),
    [
        ({"": TenantShare()}, "1 to 256 characters, one has 0"),
        ({"x" * 257: TenantShare()}, "one has 257"),
        ({str(index): TenantShare() for index in range(TENANTS_MAX + 1)}, "10001 tenants"),
    ],
    ids=["no name", "a long name", "many"],
)
def test_what_is_out_of_bounds_changes_nothing(
    settings: Settings, tenants: dict[str, TenantShare | None], words: str
) -> None:
    book = ScheduleBook(settings)
    with pytest.raises(InvalidRequest, match=words):
        book.change(ScheduleChanges(cap_gbps=1.0, tenants=tenants))
    assert book.changes == ScheduleChanges()
    assert not settings.schedule_file.exists()


def test_changes_from_many_threads_are_all_kept(settings: Settings) -> None:
    book = ScheduleBook(settings)

    def change(index: int) -> None:
        book.change(ScheduleChanges(tenants={str(index): TenantShare(weight=1 + index)}))

    threads = [threading.Thread(target=change, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = {str(index): TenantShare(weight=1 + index) for index in range(8)}
    assert ScheduleBook(settings).configuration.tenants == expected


# --- the file ---


def test_the_file_is_the_servers_users_alone(settings: Settings) -> None:
    ScheduleBook(settings).change(ScheduleChanges(cap_gbps=5.0))
    assert stat.S_IMODE(settings.schedule_file.stat().st_mode) == 0o600
    assert settings.schedule_file.read_text() == '{\n  "cap_gbps": 5.0\n}'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "truncated"),
        ("{", "truncated"),
        ("[]", "Expected `object`"),
        ('{"cap": 5}', "unknown field `cap`"),
        ('{"cap_gbps": -1}', r">= 0.0 - at `\$.cap_gbps`"),
        ('{"cap_gbps": NaN}', "malformed"),
        ('{"policy": "fastest"}', r"'fastest' - at `\$.policy`"),
        ('{"tenants": {"a": {"weight": 0}}}', r"\$.tenants\[...\].weight"),
        ('{"tenants": {"": {}}}', "1 to 256 characters"),
        ("\udcff", "malformed"),
    ],
)
def test_a_broken_file_stops_the_start_and_says_what_to_do(
    settings: Settings, text: str, words: str
) -> None:
    settings.schedule_file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InvalidRequest, match=words) as caught:
        ScheduleBook(settings)
    assert str(settings.schedule_file) in caught.value.message
    assert "mend that, or delete the file" in caught.value.message


def test_a_file_that_cannot_be_read_stops_the_start(settings: Settings) -> None:
    settings.schedule_file.mkdir()
    with pytest.raises(Unavailable, match="reading the changed schedule: Is a directory"):
        ScheduleBook(settings)
    assert not is_open(settings.schedule_file)


def test_a_pipe_in_its_place_is_refused_and_not_waited_for(settings: Settings) -> None:
    os.mkfifo(settings.schedule_file)
    with pytest.raises(InvalidRequest, match="it is no ordinary file; remove it"):
        ScheduleBook(settings)


def is_open(path: Path) -> bool:
    """Whether a descriptor of this process is of what is there."""
    return any(os.path.realpath(link) == str(path) for link in Path("/proc/self/fd").iterdir())


def in_a_child_that_dies(action: Callable[[], object], before: str) -> None:
    """Run `action` in another process that ends, as by a kill, when it first calls `os.before`."""
    child = os.fork()
    if child == 0:

        def die(*_: object, **__: object) -> None:
            os._exit(9)

        setattr(os, before, die)
        action()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.parametrize("before", ["fsync", "replace"])
def test_a_kill_before_the_rename_leaves_the_file_as_it_was(
    settings: Settings, before: str
) -> None:
    book = ScheduleBook(settings)
    book.change(ScheduleChanges(cap_gbps=5.0))
    in_a_child_that_dies(lambda: book.change(ScheduleChanges(cap_gbps=6.0)), before)
    again = ScheduleBook(settings)
    assert again.changes == ScheduleChanges(cap_gbps=5.0)
    again.change(ScheduleChanges(cap_gbps=7.0))  # what the dead one left is in nobody's way
    assert ScheduleBook(settings).changes == ScheduleChanges(cap_gbps=7.0)
    assert [path.name for path in settings.data_dir.iterdir()] == ["schedule.json"]


@pytest.mark.parametrize(
    ("number", "error"), [(errno.ENOSPC, StorageFull), (errno.EIO, Unavailable)]
)
def test_a_change_that_cannot_be_kept_is_not_in_force_either(
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    error: type[Exception],
) -> None:
    book = ScheduleBook(settings)
    book.change(ScheduleChanges(cap_gbps=5.0))
    before = book.configuration

    def fails(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fails)
        with pytest.raises(error, match="keeping the changed schedule"):
            book.change(ScheduleChanges(cap_gbps=6.0))
    assert book.configuration == before
    assert ScheduleBook(settings).configuration == before
    assert [path.name for path in settings.data_dir.iterdir()] == ["schedule.json"]
    assert book.change(ScheduleChanges(cap_gbps=6.0)).cap_gbps == 6.0
