"""Copies within the store: admitted, counted and bounded as puts are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from objectcache_runtime.settings import (
    SchedulerSettings,
    ServerSettings,
    Settings,
    StorageSettings,
)
from objectcache_schemas.errors import Busy, InvalidRequest, NotFound, ObjectCacheError
from objectcache_schemas.limits import Limits
from objectcache_schemas.messages.uploads import CompleteUpload, CreateUpload, Upload
from objectcache_schemas.messages.writes import CopyObject, CopyPart
from objectcache_schemas.records import BucketInfo, ObjectAttributes
from objectcache_storage_server.engines.memory.engine import MemoryEngine
from objectcache_storage_server.s3 import multipart
from objectcache_storage_server.s3.copy_requests import complete, copy_object, copy_part
from objectcache_storage_server.s3.upload_requests import count_part, count_uploads, create_upload
from objectcache_storage_server.service import Service
from tests.contract.engine_suite import put

BUCKET = BucketInfo(name="bucket", owner="alice", region="r", created_s=1.0)
OBJECT_BYTES_MAX = 100


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    engine = MemoryEngine()
    multipart.create_bucket(engine)
    engine.create_bucket(BUCKET)
    settings = Settings(
        server=ServerSettings(data_dir=str(tmp_path)),
        storage=StorageSettings(puts_max=2),
        limits=Limits(object_bytes_max=OBJECT_BYTES_MAX),
        scheduler=SchedulerSettings(queue_max=0),
    )
    opened = Service(settings, engine)
    yield opened
    opened.close()


def copying(source: str) -> CopyObject:
    return CopyObject(
        source_bucket=BUCKET.name,
        source_key=source,
        source_etag="",
        bucket=BUCKET.name,
        key="copy",
        attributes=ObjectAttributes(),
        etag="etag",
        identity="alice",
    )


def opened(service: Service) -> str:
    create = CreateUpload(bucket=BUCKET.name, key="big", attributes=ObjectAttributes())
    upload = create_upload(service.uploads, create)
    assert isinstance(upload, Upload)
    return upload.info.upload_id


def part_of(upload_id: str, length_bytes: int) -> CopyPart:
    return CopyPart(
        source_bucket=BUCKET.name,
        source_key="source",
        source_etag="",
        offset_bytes=0,
        length_bytes=length_bytes,
        bucket=BUCKET.name,
        key="big",
        upload_id=upload_id,
        part_number=1,
        identity="alice",
    )


@pytest.mark.asyncio
async def test_a_source_over_the_largest_object_is_copied_in_ranges_only(service: Service) -> None:
    put(service.engine, "source", bytes(OBJECT_BYTES_MAX + 1), bucket=BUCKET.name)
    put(service.engine, "fits", bytes(OBJECT_BYTES_MAX), bucket=BUCKET.name)
    with pytest.raises(InvalidRequest, match=r"limits\.object_bytes_max") as caught:
        await copy_object(service.puts, copying("source"))
    assert caught.value.code == "InvalidRequest"
    assert (await copy_object(service.puts, copying("fits"))).info.size_bytes == OBJECT_BYTES_MAX
    upload_id = opened(service)
    with pytest.raises(InvalidRequest, match=r"limits\.object_bytes_max"):
        await copy_part(service.uploads, part_of(upload_id, OBJECT_BYTES_MAX + 1))
    part = await copy_part(service.uploads, part_of(upload_id, OBJECT_BYTES_MAX))
    assert part.info.size_bytes == OBJECT_BYTES_MAX


@pytest.mark.asyncio
async def test_copies_and_joins_that_copy_take_places_of_puts(service: Service) -> None:
    put(service.engine, "source", b"ten bytes.", bucket=BUCKET.name)
    upload_id = opened(service)
    part = await copy_part(service.uploads, part_of(upload_id, 10))
    assert part.info.etag == hashlib.md5(b"ten bytes.", usedforsecurity=False).hexdigest()
    joined = CompleteUpload(
        bucket=BUCKET.name,
        key="big",
        upload_id=upload_id,
        parts=((1, part.info.etag),),
        identity="alice",
    )
    for who in ("others", "more"):
        await service.gates.puts.take(who, 1)
    with pytest.raises(Busy, match=r"storage\.puts_max"):
        await copy_object(service.puts, copying("source"))
    with pytest.raises(Busy, match=r"storage\.puts_max"):
        await copy_part(service.uploads, part_of(upload_id, 10))
    with pytest.raises(Busy, match=r"storage\.puts_max"):
        await complete(service.uploads, joined)
    service.gates.puts.give_back("others", 1)
    await copy_object(service.puts, copying("source"))
    assert (await complete(service.uploads, joined)).info.size_bytes == 10
    assert service.gates.slots.puts == 1
    assert service.books.in_flight.tenants() == ()


@pytest.mark.parametrize("bucket_goes", [False, True])
def test_a_part_of_an_upload_that_has_ended_is_deleted_and_not_counted(
    service: Service, bucket_goes: bool
) -> None:
    name = multipart.UploadName(BUCKET.name, "big", opened(service))
    key = multipart.part_key(name.upload_id, 1)
    if bucket_goes:
        service.engine.delete_bucket(BUCKET.name)
    else:
        multipart.abort_upload(service.engine, name)
        service.books.stored.upload_ended(name.upload_id)
    put(service.engine, key, b"late", bucket=multipart.BUCKET)
    reservation = service.books.stored.empty(BUCKET)
    with pytest.raises(NotFound) as caught:
        count_part(service.uploads, name, 1, reservation)
    assert caught.value.code == "NoSuchUpload"
    with pytest.raises(ObjectCacheError):
        service.engine.stat(multipart.BUCKET, key)


def test_uploads_without_a_bucket_are_forgotten_at_the_start(service: Service) -> None:
    kept = opened(service)
    service.engine.create_bucket(BucketInfo(name="gone", owner="a", region="r", created_s=1.0))
    lost = multipart.create_upload(service.engine, "gone", "key", ObjectAttributes())
    put(
        service.engine,
        multipart.part_key(lost.upload_id, 1),
        b"data",
        bucket=multipart.BUCKET,
    )
    service.engine.delete_bucket("gone")
    count_uploads(service.uploads)
    assert [name.upload_id for name in multipart.open_uploads(service.engine)] == [kept]
    assert list(multipart.all_parts(service.engine)) == []
