"""Multipart uploads, kept as ordinary objects in a bucket of the storage server's own.

An upload is an empty object that carries the attributes; its parts are objects beside it. So an
upload survives a restart on any persistent engine, and any storage server can go on with it. All
functions block.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from typing import NamedTuple

from objectcache_schemas.errors import Conflict, InvalidRequest, NotFound
from objectcache_schemas.messages.reads import ListObjects
from objectcache_schemas.messages.uploads import ListParts, ListUploads, Parts, Uploads
from objectcache_schemas.messages.writes import CopyPart
from objectcache_schemas.records import (
    BucketInfo,
    ObjectAttributes,
    ObjectInfo,
    PartInfo,
    UploadInfo,
)
from objectcache_storage_server.engines.base import Engine, Staged, StagedPut
from objectcache_storage_server.s3.copied_checksums import CopiedChecksums
from objectcache_storage_server.s3.list_objects import list_objects

BUCKET = ".multipart"
PART_NUMBER_MAX = 10_000
LIST_LIMIT_MAX = 1000
_SEPARATOR = "\x01"  # sorts before everything a key may go on with
_UPLOAD_ID_BYTES = 16
PARTS_PREFIX = "p/"
UPLOADS_PREFIX = "u/"


class UploadName(NamedTuple):
    """What names an upload on the wire."""

    bucket: str
    key: str
    upload_id: str


def create_bucket(engine: Engine) -> None:
    """Create the uploads' bucket where it is missing, and drop parts whose upload is gone."""
    try:
        engine.bucket(BUCKET)
    except NotFound:
        with contextlib.suppress(Conflict):  # another server of the store was first
            engine.create_bucket(BucketInfo(name=BUCKET, owner="", region="", created_s=0.0))
    # Parts first: what is opened meanwhile, at another server, has none of these.
    part_ids = {part_upload_id(info) for info in _scan_all(engine, PARTS_PREFIX)}
    open_ids = {_upload_id(info.key) for info in _scan_all(engine, UPLOADS_PREFIX)}
    for upload_id in part_ids - open_ids:
        forget_parts(engine, upload_id)


def open_uploads(engine: Engine) -> Iterator[UploadName]:
    """Every open upload."""
    for info in _scan_all(engine, UPLOADS_PREFIX):
        yield upload_name(info.key.split("/")[1], info)


def all_parts(engine: Engine) -> Iterator[tuple[str, int, int]]:
    """Upload, number and bytes of every part."""
    for info in _scan_all(engine, PARTS_PREFIX):
        yield part_upload_id(info), int(info.key.rpartition("/")[2]), info.size_bytes


def part_key(upload_id: str, part_number: int) -> str:
    """Key of a part in `BUCKET`. Raises `InvalidRequest` for a number that S3 does not allow."""
    if not 1 <= part_number <= PART_NUMBER_MAX:
        raise InvalidRequest(f"partNumber must be from 1 to {PART_NUMBER_MAX}, got {part_number}")
    return f"p/{upload_id}/{part_number:05d}"


def _upload_key(name: UploadName) -> str:
    return f"u/{name.bucket}/{name.key}{_SEPARATOR}{name.upload_id}"


def _upload_id(upload_key: str) -> str:
    return upload_key.rpartition(_SEPARATOR)[2]


def upload_id_of(info: ObjectInfo) -> str:
    """Id of the upload that an object of `BUCKET` stands for."""
    return _upload_id(info.key)


def part_upload_id(info: ObjectInfo) -> str:
    """Upload of a part, which need not be open any more."""
    return info.key.split("/")[1]


def create_upload(
    engine: Engine, bucket: str, key: str, attributes: ObjectAttributes
) -> UploadInfo:
    """Open an upload."""
    created_s = engine.fresh_bucket(bucket).created_s
    name = UploadName(bucket, key, secrets.token_hex(_UPLOAD_ID_BYTES))
    staged = engine.stage(BUCKET, _upload_key(name))
    committed = engine.commit([StagedPut(staged, "", attributes)])
    _check_still_there(engine, name, created_s)
    return _upload_info(bucket, committed[0].info)


def _check_still_there(engine: Engine, name: UploadName, created_s: float) -> None:
    """A bucket that was deleted while an upload was opened in it takes the upload along."""
    try:
        is_same = engine.fresh_bucket(name.bucket).created_s == created_s
    except NotFound:
        is_same = False
    if not is_same:
        forget_upload(engine, name)
        raise NotFound(f"bucket {name.bucket!r} was deleted meanwhile", code="NoSuchBucket")


def _upload_info(bucket: str, info: ObjectInfo) -> UploadInfo:
    key, _, upload_id = info.key.removeprefix(f"u/{bucket}/").rpartition(_SEPARATOR)
    return UploadInfo(
        key=key, upload_id=upload_id, created_s=info.modified_s, attributes=info.attributes
    )


def uploads_prefix(bucket: str, prefix: str) -> str:
    """Prefix in `BUCKET` of the open uploads of a bucket's keys with a prefix."""
    return f"u/{bucket}/{prefix}"


def upload_name(bucket: str, info: ObjectInfo) -> UploadName:
    """What names the upload that an object of `BUCKET` stands for."""
    return UploadName(bucket, _upload_info(bucket, info).key, _upload_id(info.key))


def check_upload(engine: Engine, name: UploadName) -> UploadInfo:
    """The upload, if it is open. Raises `NotFound` (NoSuchUpload)."""
    engine.bucket(name.bucket)
    try:
        return _upload_info(name.bucket, engine.stat(BUCKET, _upload_key(name)))
    except NotFound as error:
        raise NotFound("the upload is not open", code="NoSuchUpload") from error


def abort_upload(engine: Engine, name: UploadName) -> None:
    """Forget an upload and its parts."""
    check_upload(engine, name)
    forget_upload(engine, name)


def forget_upload(engine: Engine, name: UploadName) -> None:
    """Delete what is stored of an upload, open or not."""
    engine.delete(BUCKET, [_upload_key(name)])  # first: who stores a part looks for it afterwards
    forget_parts(engine, name.upload_id)


def forget_parts(engine: Engine, upload_id: str) -> None:
    """Delete all parts that are stored of an upload."""
    engine.delete(BUCKET, [info.key for info in _scan_all(engine, f"p/{upload_id}/")])


def forget_uploads(engine: Engine, bucket: str) -> None:
    """Forget all uploads of a bucket that was deleted."""
    for info in list(_scan_all(engine, f"u/{bucket}/")):
        forget_upload(
            engine, UploadName(bucket, _upload_info(bucket, info).key, _upload_id(info.key))
        )


def _scan_all(engine: Engine, prefix: str) -> Iterator[ObjectInfo]:
    start_after = ""
    while page := engine.scan(BUCKET, prefix, start_after, LIST_LIMIT_MAX):
        yield from page
        start_after = page[-1].key


def list_parts(engine: Engine, request: ListParts) -> Parts:
    """One page of an upload's parts."""
    upload = check_upload(engine, UploadName(request.bucket, request.key, request.upload_id))
    limit = min(request.limit, LIST_LIMIT_MAX)
    prefix = f"p/{request.upload_id}/"
    start_after = f"{prefix}{max(0, request.after_part_number):05d}"
    page = engine.scan(BUCKET, prefix, start_after, limit + 1)
    parts = tuple(_part_info(info) for info in page[:limit])
    return Parts(upload=upload, parts=parts, truncated=len(page) > limit)


def _part_info(info: ObjectInfo) -> PartInfo:
    return PartInfo(
        part_number=int(info.key.rpartition("/")[2]),
        size_bytes=info.size_bytes,
        etag=info.etag,
        modified_s=info.modified_s,
        checksums=info.attributes.checksums,
    )


def list_uploads(engine: Engine, request: ListUploads) -> Uploads:
    """One page of a bucket's open uploads."""
    engine.bucket(request.bucket)
    base = f"u/{request.bucket}/"
    page = list_objects(
        ListObjects(
            bucket=BUCKET,
            prefix=base + request.prefix,
            delimiter=request.delimiter,
            start_after=_upload_marker(request),
            limit=request.limit,
        ),
        lambda prefix, after, limit: engine.scan(BUCKET, prefix, after, limit),
        shown=lambda stored: stored.rpartition(_SEPARATOR)[0],
    )
    uploads = tuple(_upload_info(request.bucket, info) for info in page.objects)
    after = page.next_start_after
    ends_with_upload = bool(page.objects) and page.objects[-1].key == after
    return Uploads(
        uploads=uploads,
        truncated=after is not None,
        common_prefixes=tuple(rolled.removeprefix(base) for rolled in page.common_prefixes),
        next_key=uploads[-1].key if ends_with_upload else (after or "").removeprefix(base),
        next_upload_id=uploads[-1].upload_id if ends_with_upload else "",
    )


def _upload_marker(request: ListUploads) -> str:
    """Key in `BUCKET` after which a page begins."""
    key = request.after_key
    if not key:
        return ""
    if request.delimiter and key.endswith(request.delimiter) and not request.after_upload_id:
        return f"u/{request.bucket}/{key}"  # a common prefix, perhaps, which is passed over whole
    # Without an upload id, all uploads of the marker's key are passed over.
    after_id = request.after_upload_id or "\U0010ffff"
    return _upload_key(UploadName(request.bucket, key, after_id))


def copy_part(engine: Engine, request: CopyPart) -> ObjectInfo:
    """Store a range of an object as a part, with its MD5 as ETag and the upload's checksum."""
    upload = check_upload(engine, UploadName(request.bucket, request.key, request.upload_id))
    staged = engine.stage(BUCKET, part_key(request.upload_id, request.part_number))
    try:
        hashed = _HashedStaged(staged, checksum_algorithm(upload))
        engine.copy(
            request.source_bucket,
            request.source_key,
            hashed,
            request.offset_bytes,
            request.length_bytes,
            request.source_etag,
        )
        attributes = ObjectAttributes(checksums=hashed.running.checksums)
        put = StagedPut(staged, hashed.running.md5_hex, attributes)
        return engine.commit([put])[0].info
    finally:
        staged.discard()


def checksum_algorithm(upload: UploadInfo) -> str | None:
    """The algorithm that the upload was created with; its attributes name it without a value."""
    return next(iter(upload.attributes.checksums), None)


class _HashedStaged(Staged):
    """Hashes what is written in order to another staged object."""

    def __init__(self, inner: Staged, algorithm: str | None) -> None:
        self.inner = inner
        self.running = CopiedChecksums(algorithm)

    def write_at(self, offset_bytes: int, data: memoryview) -> None:
        self.running.update(data)
        self.inner.write_at(offset_bytes, data)

    def discard(self) -> None:
        self.inner.discard()
