"""Multipart uploads, kept as ordinary objects in a bucket of the storage server's own.

An upload is an empty object that carries the attributes; its parts are objects beside it. So an
upload survives a restart on any persistent engine, and any storage server can go on with it. All
functions block.
"""

from __future__ import annotations

import binascii
import hashlib
import secrets
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from objectcache_schemas.errors import Conflict, InvalidRequest, NotFound
from objectcache_schemas.limits import MIB
from objectcache_schemas.messages import (
    CompleteUpload,
    CopyPart,
    ListParts,
    ListUploads,
    Parts,
    Uploads,
)
from objectcache_schemas.records import (
    BucketInfo,
    Condition,
    ObjectAttributes,
    ObjectInfo,
    PartInfo,
    UploadInfo,
)
from objectcache_storage_server.engines.base import CHECKSUM_BLOCK_BYTES, Engine, Staged, StagedPut
from objectcache_storage_server.engines.block_checksums import slice_block_bytes

BUCKET = ".multipart"
PART_NUMBER_MAX = 10_000
PART_BYTES_MIN = 5 * MIB  # of every part but the last; S3's own
LIST_LIMIT_MAX = 1000
_SEPARATOR = "\x01"  # sorts before everything a key may go on with
_JOIN_BYTES = 1 * MIB
_UPLOAD_ID_BYTES = 16


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
        engine.create_bucket(BucketInfo(name=BUCKET, owner="", region="", created_s=0.0))
    open_ids = {_upload_id(info.key) for info in _scan_all(engine, "u/")}
    parts = [info.key for info in _scan_all(engine, "p/")]
    engine.delete(BUCKET, [key for key in parts if key.split("/")[1] not in open_ids])


def part_key(upload_id: str, part_number: int) -> str:
    """Key of a part in `BUCKET`. Raises `InvalidRequest` for a number that S3 does not allow."""
    if not 1 <= part_number <= PART_NUMBER_MAX:
        raise InvalidRequest(f"partNumber must be from 1 to {PART_NUMBER_MAX}, got {part_number}")
    return f"p/{upload_id}/{part_number:05d}"


def _upload_key(name: UploadName) -> str:
    return f"u/{name.bucket}/{name.key}{_SEPARATOR}{name.upload_id}"


def _upload_id(upload_key: str) -> str:
    return upload_key.rpartition(_SEPARATOR)[2]


def create_upload(
    engine: Engine, bucket: str, key: str, attributes: ObjectAttributes
) -> UploadInfo:
    """Open an upload."""
    engine.bucket(bucket)
    name = UploadName(bucket, key, secrets.token_hex(_UPLOAD_ID_BYTES))
    staged = engine.stage(BUCKET, _upload_key(name))
    committed = engine.commit([StagedPut(staged, "", attributes)])
    return _upload_info(bucket, committed[0].info)


def _upload_info(bucket: str, info: ObjectInfo) -> UploadInfo:
    key, _, upload_id = info.key.removeprefix(f"u/{bucket}/").rpartition(_SEPARATOR)
    return UploadInfo(
        key=key, upload_id=upload_id, created_s=info.modified_s, attributes=info.attributes
    )


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
    _forget(engine, name)


def _forget(engine: Engine, name: UploadName) -> None:
    engine.delete(BUCKET, [_upload_key(name)])
    engine.delete(BUCKET, [info.key for info in _scan_all(engine, f"p/{name.upload_id}/")])


def forget_uploads(engine: Engine, bucket: str) -> None:
    """Forget all uploads of a bucket that was deleted."""
    for info in list(_scan_all(engine, f"u/{bucket}/")):
        _forget(engine, UploadName(bucket, _upload_info(bucket, info).key, _upload_id(info.key)))


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
    limit = min(request.limit, LIST_LIMIT_MAX)
    start_after = ""
    if request.after_key:
        # Without an upload id, all uploads of the marker's key are passed over.
        after_id = request.after_upload_id or "\U0010ffff"
        start_after = _upload_key(UploadName(request.bucket, request.after_key, after_id))
    prefix = f"u/{request.bucket}/{request.prefix}"
    page = engine.scan(BUCKET, prefix, start_after, limit + 1)
    uploads = tuple(_upload_info(request.bucket, info) for info in page[:limit])
    return Uploads(uploads=uploads, truncated=len(page) > limit)


def copy_part(engine: Engine, request: CopyPart) -> ObjectInfo:
    """Store a range of an object as a part. Its ETag is the MD5 of the range."""
    check_upload(engine, UploadName(request.bucket, request.key, request.upload_id))
    staged = engine.stage(BUCKET, part_key(request.upload_id, request.part_number))
    try:
        hashed = _HashedStaged(staged)
        engine.copy(
            request.source_bucket,
            request.source_key,
            hashed,
            request.offset_bytes,
            request.length_bytes,
            request.source_etag,
        )
        return engine.commit([StagedPut(staged, hashed.md5.hexdigest())])[0].info
    finally:
        staged.discard()


class _HashedStaged(Staged):
    """Hashes what is written in order to another staged object."""

    def __init__(self, inner: Staged) -> None:
        self.inner = inner
        self.md5 = hashlib.md5(usedforsecurity=False)

    def write_at(self, offset_bytes: int, data: memoryview) -> None:
        self.md5.update(data)
        self.inner.write_at(offset_bytes, data)

    def discard(self) -> None:
        self.inner.discard()


def complete_upload(engine: Engine, request: CompleteUpload, object_bytes_max: int) -> ObjectInfo:
    """Join the parts into the object and forget the upload.

    The same completion again, after its upload is gone, answers with the object it made.
    """
    name = UploadName(request.bucket, request.key, request.upload_id)
    etag = _joined_etag(request)
    try:
        upload = check_upload(engine, name)
    except NotFound as error:
        if error.code == "NoSuchUpload" and (info := _made_before(engine, request, etag)):
            return info
        raise
    parts = _checked_parts(engine, request)
    size_bytes = sum(part.size_bytes for part in parts)
    if size_bytes > object_bytes_max:
        raise InvalidRequest(
            f"the object would hold {size_bytes} bytes, limits.joined_object_bytes_max is "
            f"{object_bytes_max}",
            code="EntityTooLarge",
        )
    attributes = msgspec.structs.replace(
        upload.attributes, part_sizes_bytes=tuple(part.size_bytes for part in parts)
    )
    info = _join(engine, request, parts, StagedAttributes(etag, attributes), request.condition)
    _forget(engine, name)
    return info


class StagedAttributes(NamedTuple):
    """What the joined object carries beside its bytes."""

    etag: str
    attributes: ObjectAttributes


def _made_before(engine: Engine, request: CompleteUpload, etag: str) -> ObjectInfo | None:
    try:
        info = engine.stat(request.bucket, request.key)
    except NotFound:
        return None
    return info if info.etag == etag else None


def _joined_etag(request: CompleteUpload) -> str:
    """MD5 of the parts' binary MD5s, a dash and their count. Raises `InvalidRequest`."""
    numbers = [number for number, _ in request.parts]
    if not numbers:
        raise InvalidRequest("the part list is empty", code="MalformedXML")
    if numbers != sorted(set(numbers)):
        raise InvalidRequest("the parts must be in ascending order", code="InvalidPartOrder")
    try:
        digests = b"".join(binascii.unhexlify(etag) for _, etag in request.parts)
    except binascii.Error as error:
        raise InvalidRequest("a part's ETag is not an MD5", code="InvalidPart") from error
    return f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(numbers)}"


def _checked_parts(engine: Engine, request: CompleteUpload) -> list[ObjectInfo]:
    parts: list[ObjectInfo] = []
    for number, etag in request.parts:
        try:
            info = engine.stat(BUCKET, part_key(request.upload_id, number))
        except NotFound as error:
            raise InvalidRequest(f"part {number} is not stored", code="InvalidPart") from error
        if info.etag != etag:
            raise InvalidRequest(f"part {number} has another ETag", code="InvalidPart")
        parts.append(info)
    for info, (number, _) in zip(parts[:-1], request.parts, strict=False):
        if info.size_bytes < PART_BYTES_MIN:
            raise InvalidRequest(
                f"part {number} has {info.size_bytes} bytes; all but the last need "
                f"{PART_BYTES_MIN}",
                code="EntityTooSmall",
            )
    return parts


def _join(
    engine: Engine,
    request: CompleteUpload,
    parts: list[ObjectInfo],
    carried: StagedAttributes,
    condition: Condition,
) -> ObjectInfo:
    layout = engine.bucket(request.bucket).layout
    if layout is not None and sum(part.size_bytes for part in parts) != layout.chunk_bytes:
        raise Conflict("the object does not fit the bucket's KV layout", code="KvLayoutConflict")
    block_bytes = (
        slice_block_bytes(layout.per_layer_chunk_bytes) if layout else CHECKSUM_BLOCK_BYTES
    )
    staged = engine.stage(request.bucket, request.key, block_bytes)
    try:
        _write_joined(engine, staged, parts, block_bytes)
        put = StagedPut(staged, carried.etag, carried.attributes)
        return engine.commit([put], condition)[0].info
    finally:
        staged.discard()


def _write_joined(
    engine: Engine, staged: Staged, parts: list[ObjectInfo], block_bytes: int
) -> None:
    """Write the parts' bytes one after the other, in whole blocks."""
    buffer = memoryview(bytearray(max(block_bytes, _JOIN_BYTES // block_bytes * block_bytes)))
    filled = written = 0
    for part in parts:
        with engine.open_many(BUCKET, [part.key]) as opened:
            if opened.infos[0] is None or opened.infos[0].etag != part.etag:
                raise InvalidRequest("a part changed during completion", code="InvalidPart")
            position = 0
            while position < part.size_bytes:
                piece = buffer[filled:][: part.size_bytes - position]
                opened.read_into(0, position, piece)
                position += len(piece)
                filled += len(piece)
                if filled == len(buffer):
                    staged.write_at(written, buffer)
                    written += filled
                    filled = 0
    if filled:
        staged.write_at(written, buffer[:filled])
