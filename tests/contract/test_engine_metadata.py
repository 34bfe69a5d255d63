"""Rules of the engine contract on what is stored beside bytes, for every engine."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from objectcache_schemas.errors import (
    AccessDenied,
    Conflict,
    InvalidRequest,
    NotFound,
    PreconditionFailed,
)
from objectcache_schemas.records import (
    AclGrant,
    AclPermission,
    BucketConfiguration,
    BucketInfo,
    Condition,
    EtagMode,
    LifecycleRule,
    ObjectAttributes,
    ObjectInfo,
    Quota,
)
from objectcache_storage_server.engines.base import (
    CHECKSUM_BLOCK_BYTES,
    BucketTotals,
    Engine,
    StagedPut,
)
from tests.contract.engine_suite import (
    BUCKET,
    LAYOUT,
    content,
    opened_engine,
    put,
    put_batch,
    read,
    read_range,
)
from tests.contract.test_engines import ENGINES

PERSISTENT = (
    *("files", "files-uncached"),
    *("local", "local-direct", "local-threads"),
    "shared-by-turns",
)
CONFIGURATION = BucketConfiguration(
    etag_mode=EtagMode.OPAQUE,
    quota=Quota(stored_bytes=10, requests_per_s=2.5),
    lifecycle=(LifecycleRule(rule_id="old", prefix="logs/", expiration_days=3),),
    tags={"team": "inference"},
)
TAGGED = ObjectAttributes(content_type="text/plain", tags={"kind": "chunk"})
NOWHERE = ObjectInfo(key="none", size_bytes=0, etag="", modified_s=0.0)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, store_of: Callable[[str], Path]) -> Iterator[Engine]:
    with opened_engine(ENGINES[request.param], store_of(request.param)) as opened:
        yield opened


def reopened(name: str, folder: Path, change: Callable[[Engine], object]) -> Engine:
    """An engine that was closed after a change, and opened again."""
    first = ENGINES[name](folder)
    first.create_bucket(BUCKET)
    change(first)
    first.close()
    return ENGINES[name](folder)


# --- configuration ---


def test_a_configuration_replaces_the_one_before_and_nothing_else(engine: Engine) -> None:
    engine.configure_bucket(BUCKET.name, CONFIGURATION)
    configured = msgspec.structs.replace(BUCKET, configuration=CONFIGURATION)
    assert engine.bucket(BUCKET.name) == configured
    assert engine.buckets() == [configured]
    engine.configure_bucket(BUCKET.name, BucketConfiguration())
    assert engine.bucket(BUCKET.name) == BUCKET


def test_a_configuration_is_replaced_only_where_it_is_the_one_that_was_seen(
    engine: Engine,
) -> None:
    seen = BucketConfiguration()
    engine.configure_bucket(BUCKET.name, CONFIGURATION, seen)
    for _ in range(2):  # at either server, where there are two
        with pytest.raises(Conflict) as caught:
            engine.configure_bucket(BUCKET.name, BucketConfiguration(tags={"a": "b"}), seen)
        assert caught.value.code == "OperationAborted"
    assert engine.fresh_bucket(BUCKET.name).configuration == CONFIGURATION
    engine.configure_bucket(BUCKET.name, seen, CONFIGURATION)


def test_who_deletes_a_bucket_judges_it_as_it_is_then(engine: Engine) -> None:
    def judge(bucket: BucketInfo) -> None:
        if bucket.configuration != BucketConfiguration():
            raise AccessDenied("it is configured")

    for _ in range(2):
        engine.configure_bucket(BUCKET.name, CONFIGURATION)
        with pytest.raises(AccessDenied, match="it is configured"):
            engine.delete_bucket(BUCKET.name, judge)
    engine.configure_bucket(BUCKET.name, BucketConfiguration())
    engine.delete_bucket(BUCKET.name, judge)
    with pytest.raises(NotFound):
        engine.fresh_bucket(BUCKET.name)


def test_a_fresh_bucket_is_as_it_was_last_changed(engine: Engine) -> None:
    for configuration in (CONFIGURATION, BucketConfiguration(), CONFIGURATION):
        engine.configure_bucket(BUCKET.name, configuration)
        assert engine.fresh_bucket(BUCKET.name).configuration == configuration
    engine.delete_bucket(BUCKET.name)
    with pytest.raises(NotFound):
        engine.fresh_bucket(BUCKET.name)


def test_a_layout_and_a_configuration_do_not_undo_each_other(engine: Engine) -> None:
    engine.configure_bucket(BUCKET.name, CONFIGURATION)
    engine.set_layout(BUCKET.name, LAYOUT)
    found = engine.bucket(BUCKET.name)
    assert (found.configuration, found.layout) == (CONFIGURATION, LAYOUT)


def test_a_missing_bucket_has_no_configuration_usage_or_attributes(engine: Engine) -> None:
    for call in (
        lambda: engine.configure_bucket("none", CONFIGURATION),
        lambda: engine.usage("none"),
        lambda: engine.replace_attributes("none", NOWHERE, TAGGED),
    ):
        with pytest.raises(NotFound) as caught:
            call()
        assert caught.value.code == "NoSuchBucket"


# --- attributes ---


def test_replaced_attributes_leave_bytes_etag_and_time(engine: Engine) -> None:
    before = put(engine, "key", b"data", etag="mine").info
    answered = engine.replace_attributes(BUCKET.name, before, TAGGED)
    assert answered == msgspec.structs.replace(before, attributes=TAGGED)
    assert engine.stat(BUCKET.name, "key") == answered
    assert engine.scan(BUCKET.name, "", "", 10) == [answered]
    assert read(engine, "key") == b"data"


def test_an_object_that_was_open_before_shows_its_attributes_when_opened_again(
    engine: Engine,
) -> None:
    seen = put(engine, "key", b"data").info
    read(engine, "key")  # an engine may keep what it opened
    engine.replace_attributes(BUCKET.name, seen, TAGGED)
    with engine.open_many(BUCKET.name, ["key"]) as opened:
        assert opened.infos[0] is not None
        assert opened.infos[0].attributes == TAGGED


def test_attributes_of_another_etag_time_or_size_are_refused_and_nothing_changes(
    engine: Engine,
) -> None:
    stored = put(engine, "key", b"data", etag="mine").info
    for other in (
        msgspec.structs.replace(stored, etag="other"),
        msgspec.structs.replace(stored, etag=""),
        msgspec.structs.replace(stored, modified_s=stored.modified_s - 1),
        msgspec.structs.replace(stored, size_bytes=5),
    ):
        with pytest.raises(PreconditionFailed):
            engine.replace_attributes(BUCKET.name, other, TAGGED)
    assert engine.stat(BUCKET.name, "key") == stored
    engine.replace_attributes(BUCKET.name, stored, TAGGED)
    assert engine.stat(BUCKET.name, "key").attributes == TAGGED


def test_of_two_changes_of_the_same_attributes_the_later_one_undoes_nothing(
    engine: Engine,
) -> None:
    public = ObjectAttributes(acl=(AclGrant("everybody", AclPermission.READ),))
    seen = engine.replace_attributes(BUCKET.name, put(engine, "key", b"data").info, public)
    private = engine.replace_attributes(BUCKET.name, seen, ObjectAttributes())
    tagged = msgspec.structs.replace(seen.attributes, tags=TAGGED.tags)
    with pytest.raises(PreconditionFailed):
        engine.replace_attributes(BUCKET.name, seen, tagged)
    assert engine.stat(BUCKET.name, "key") == private


def test_an_overwrite_with_the_same_bytes_is_another_object(engine: Engine) -> None:
    seen = put(engine, "key", b"data", etag="same").info
    private = ObjectAttributes(content_type="text/html")
    again = put(engine, "key", b"data", etag="same", attributes=private).info
    with pytest.raises(PreconditionFailed):
        engine.replace_attributes(BUCKET.name, seen, TAGGED)
    assert engine.stat(BUCKET.name, "key") == again


def test_a_key_without_an_object_has_no_attributes(engine: Engine) -> None:
    with pytest.raises(NotFound) as caught:
        engine.replace_attributes(BUCKET.name, NOWHERE, TAGGED)
    assert caught.value.code == "NoSuchKey"


def test_an_immutable_chunk_takes_attributes_and_stays_the_same_chunk(engine: Engine) -> None:
    engine.set_layout(BUCKET.name, LAYOUT)
    data = content("chunk", LAYOUT.chunk_bytes)
    engine.replace_attributes(BUCKET.name, put(engine, "key", data).info, TAGGED)
    again = put(engine, "key", data)
    assert again.existed
    assert again.info.attributes == TAGGED


def test_replaced_attributes_survive_many_changes_of_their_neighbours(engine: Engine) -> None:
    put_batch(engine, {f"key-{number}": content(number, 1000) for number in range(20)})
    for number in range(20):
        attributes = ObjectAttributes(tags={"number": str(number)})
        seen = engine.stat(BUCKET.name, f"key-{number}")
        engine.replace_attributes(BUCKET.name, seen, attributes)
    engine.delete(BUCKET.name, [f"key-{number}" for number in range(0, 20, 2)])
    for number in range(1, 20, 2):
        found = engine.stat(BUCKET.name, f"key-{number}")
        assert found.attributes.tags == {"number": str(number)}
        assert read(engine, f"key-{number}") == content(number, 1000)


# --- usage ---


def test_usage_follows_every_change(engine: Engine) -> None:
    assert engine.usage(BUCKET.name) == BucketTotals(0, 0)
    put(engine, "one", b"12345")
    put_batch(engine, {"two": b"1234567", "three": b"", "four": b"1"})
    assert engine.usage(BUCKET.name) == BucketTotals(4, 13)
    put(engine, "two", b"12")  # in place of seven bytes
    assert engine.usage(BUCKET.name) == BucketTotals(4, 8)
    engine.replace_attributes(BUCKET.name, engine.stat(BUCKET.name, "two"), TAGGED)
    assert engine.usage(BUCKET.name) == BucketTotals(4, 8)
    engine.delete(BUCKET.name, ["one", "three", "none"])
    assert engine.usage(BUCKET.name) == BucketTotals(2, 3)


def test_what_is_stored_already_or_refused_does_not_count(engine: Engine) -> None:
    put(engine, "key", b"12345")
    put(engine, "key", b"12345", Condition(immutable=True))
    with pytest.raises(PreconditionFailed):
        put(engine, "key", b"1", Condition(absent=True))
    assert engine.usage(BUCKET.name) == BucketTotals(1, 5)


def test_buckets_are_counted_apart_and_a_deleted_one_begins_anew(engine: Engine) -> None:
    engine.create_bucket(msgspec.structs.replace(BUCKET, name="second"))
    put(engine, "key", b"123", bucket="second")
    put(engine, "key", b"1")
    assert engine.usage("second") == BucketTotals(1, 3)
    assert engine.usage(BUCKET.name) == BucketTotals(1, 1)
    engine.delete("second", ["key"])
    engine.delete_bucket("second")
    engine.create_bucket(msgspec.structs.replace(BUCKET, name="second"))
    assert engine.usage("second") == BucketTotals(0, 0)


# --- expiry ---


def test_what_is_unchanged_expires_and_what_was_changed_stays(engine: Engine) -> None:
    seen = [put(engine, f"key-{number}", content(number, 100 + number)).info for number in range(4)]
    put(engine, "key-1", b"overwritten")
    engine.replace_attributes(BUCKET.name, seen[2], TAGGED)
    engine.delete(BUCKET.name, ["key-3"])
    assert engine.expire(BUCKET.name, seen) == BucketTotals(1, 100)
    assert [info.key for info in engine.scan(BUCKET.name, "", "", 10)] == ["key-1", "key-2"]
    assert engine.expire(BUCKET.name, []) == BucketTotals(0, 0)


def test_what_is_pinned_does_not_expire(tmp_path: Path) -> None:
    with contextlib.closing(ENGINES["local"](tmp_path)) as engine:
        engine.create_bucket(BUCKET)
        seen = [put(engine, key, b"12").info for key in ("kept", "gone")]
        engine.pin(BUCKET.name, ["kept"], True)
        assert engine.expire(BUCKET.name, seen) == BucketTotals(1, 2)
        assert engine.stat(BUCKET.name, "kept").size_bytes == 2
        engine.pin(BUCKET.name, ["kept"], False)
        assert engine.expire(BUCKET.name, seen) == BucketTotals(1, 2)


# --- joining ---

JOINING = tuple(name for name in ENGINES if name.startswith(("local", "shared")))  # the others copy


@pytest.fixture(params=JOINING)
def joining_engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    with contextlib.closing(ENGINES[request.param](tmp_path / "data")) as opened:
        opened.create_bucket(BUCKET)
        yield opened


PARTS = msgspec.structs.replace(BUCKET, name=".parts")
BLOCK = CHECKSUM_BLOCK_BYTES


def stored_parts(engine: Engine, *sizes_bytes: int) -> list[ObjectInfo]:
    engine.create_bucket(PARTS)
    return [
        put(engine, f"part-{number}", content(number, size), bucket=PARTS.name).info
        for number, size in enumerate(sizes_bytes)
    ]


def joined_put(engine: Engine, sources: list[ObjectInfo], key: str = "whole") -> StagedPut:
    staged = engine.stage_joined(BUCKET.name, key, PARTS.name, sources)
    assert staged is not None
    return StagedPut(staged, "joined", TAGGED)


@pytest.mark.parametrize("sizes", [(BLOCK, 100), (20 * BLOCK, 3 * BLOCK, 7), (5,), (BLOCK, 0)])
def test_a_joined_object_has_the_bytes_of_its_sources_which_are_gone(
    joining_engine: Engine, sizes: tuple[int, ...]
) -> None:
    sources = stored_parts(joining_engine, *sizes)
    put(joining_engine, "whole", content("before", 3 * BLOCK))
    (committed,) = joining_engine.commit([joined_put(joining_engine, sources)])
    expected = b"".join(content(number, size) for number, size in enumerate(sizes))
    assert read(joining_engine, "whole") == expected
    assert (committed.info.etag, committed.info.attributes) == ("joined", TAGGED)
    assert joining_engine.scan(PARTS.name, "", "", 10) == []
    assert joining_engine.usage(BUCKET.name) == BucketTotals(1, len(expected))
    assert joining_engine.usage(PARTS.name) == BucketTotals(0, 0)
    with joining_engine.open_many(BUCKET.name, ["whole"]) as opened:
        middle = len(expected) // 2
        assert read_range(opened, 0, middle, len(expected) - middle) == expected[middle:]


def test_joining_what_changed_meanwhile_changes_nothing(joining_engine: Engine) -> None:
    sources = stored_parts(joining_engine, BLOCK, 10)
    joined = joined_put(joining_engine, sources)
    put(joining_engine, "part-1", b"another", bucket=PARTS.name)
    with pytest.raises(InvalidRequest) as caught:
        joining_engine.commit([joined])
    assert caught.value.code == "InvalidPart"
    assert read(joining_engine, "whole") is None
    assert read(joining_engine, "part-0", PARTS.name) == content(0, BLOCK)
    assert joining_engine.stage_joined(BUCKET.name, "whole", PARTS.name, sources) is None


def test_a_joined_object_that_is_discarded_or_refused_leaves_its_sources(
    joining_engine: Engine,
) -> None:
    sources = stored_parts(joining_engine, BLOCK, 10)
    joined_put(joining_engine, sources).staged.discard()
    put(joining_engine, "whole", b"taken")
    with pytest.raises(PreconditionFailed):
        joining_engine.commit([joined_put(joining_engine, sources)], Condition(absent=True))
    assert read(joining_engine, "part-0", PARTS.name) == content(0, BLOCK)
    assert read(joining_engine, "whole") == b"taken"


def test_sources_that_end_within_a_block_are_not_joined_without_a_copy(
    joining_engine: Engine,
) -> None:
    sources = stored_parts(joining_engine, BLOCK + 1, 10)
    assert joining_engine.stage_joined(BUCKET.name, "whole", PARTS.name, sources) is None


# --- restarts ---


@pytest.mark.parametrize("name", PERSISTENT)
def test_a_configuration_attributes_and_usage_outlive_the_process(
    name: str, tmp_path: Path
) -> None:
    def change(engine: Engine) -> None:
        engine.configure_bucket(BUCKET.name, CONFIGURATION)
        put_batch(engine, {"one": b"12345", "two": b"123", "empty": b""})
        engine.delete(BUCKET.name, ["two"])
        engine.replace_attributes(BUCKET.name, engine.stat(BUCKET.name, "one"), TAGGED)

    engine = reopened(name, tmp_path / "data", change)
    try:
        assert engine.bucket(BUCKET.name).configuration == CONFIGURATION
        assert engine.stat(BUCKET.name, "one").attributes == TAGGED
        assert read(engine, "one") == b"12345"
        assert engine.usage(BUCKET.name) == BucketTotals(2, 5)
        engine.delete(BUCKET.name, ["one"])
        assert engine.usage(BUCKET.name) == BucketTotals(1, 0)
    finally:
        engine.close()


def test_a_store_of_files_from_before_there_were_totals_is_counted_when_it_opens(
    tmp_path: Path,
) -> None:
    def change(engine: Engine) -> None:
        put_batch(engine, {"one": b"12345", "two": b"123"})

    reopened("files", tmp_path, change).close()
    with contextlib.closing(sqlite3.connect(tmp_path / "index.sqlite3")) as index, index:
        for trigger in ("usage_before_insert", "usage_after_insert", "usage_after_delete"):
            index.execute(f"DROP TRIGGER {trigger}")
        index.execute("DROP TABLE usage")
    with contextlib.closing(ENGINES["files"](tmp_path)) as engine:
        assert engine.usage(BUCKET.name) == BucketTotals(2, 8)
        put(engine, "one", b"1")
        assert engine.usage(BUCKET.name) == BucketTotals(2, 4)


def test_a_joined_object_outlives_the_process_and_its_deletion_frees_its_space(
    tmp_path: Path,
) -> None:
    def change(engine: Engine) -> None:
        engine.commit([joined_put(engine, stored_parts(engine, 4 * BLOCK, 5 * BLOCK, 9))])

    with contextlib.closing(reopened("local", tmp_path, change)) as engine:
        expected = content(0, 4 * BLOCK) + content(1, 5 * BLOCK) + content(2, 9)
        assert read(engine, "whole") == expected
        report = engine.check(False, lambda _: True)
        assert (report.damaged, report.leaked_bytes) == (0, 0)
        engine.delete(BUCKET.name, ["whole"])
        assert engine.status().allocated_bytes == 0
