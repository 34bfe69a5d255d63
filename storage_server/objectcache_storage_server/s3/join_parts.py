"""CompleteMultipartUpload: parts become one object, without a copy where the engine can."""

from __future__ import annotations

import binascii
import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import msgspec

from objectcache_schemas.errors import Conflict, InvalidRequest, NotFound
from objectcache_schemas.limits import MIB
from objectcache_schemas.messages.uploads import CompleteUpload
from objectcache_schemas.records import ObjectAttributes, ObjectInfo
from objectcache_storage_server.engines.base import (
    Engine,
    Staged,
    StagedPut,
    object_block_bytes,
)
from objectcache_storage_server.s3.multipart import (
    BUCKET,
    UploadName,
    check_upload,
    forget_upload,
    part_key,
)

PART_BYTES_MIN = 5 * MIB  # of every part but the last; S3's own
_JOIN_BYTES = 1 * MIB


Copying = Callable[[int], AbstractContextManager[None]]


def complete_upload(
    engine: Engine,
    request: CompleteUpload,
    object_bytes_max: int,
    judge: Callable[[], None],
    copying: Copying,
) -> ObjectInfo:
    """Join the parts into the object and forget the upload.

    The same completion again, after its upload is gone, answers with the object it made. Otherwise
    `judge` is called before anything is joined, and where the engine needs a copy it is made within
    `copying`, of so many bytes; both may refuse.
    """
    name = UploadName(request.bucket, request.key, request.upload_id)
    etag = joined_etag(request.parts)
    try:
        upload = check_upload(engine, name)
        parts = _checked_parts(engine, request)
    except (NotFound, InvalidRequest) as error:
        # Its parts are gone before it is, should the server end in between.
        if error.code not in ("NoSuchUpload", "InvalidPart"):
            raise
        made = _made_before(engine, request, etag)
        if made is None:
            raise
        forget_upload(engine, name)
        return made
    _check_size(sum(part.size_bytes for part in parts), object_bytes_max)
    attributes = _attributes(upload.attributes, request, parts)
    judge()
    info = _join(engine, request, parts, etag, attributes, copying)
    forget_upload(engine, name)
    return info


def joined_etag(parts: Sequence[tuple[int, str]]) -> str:
    """MD5 of the parts' binary MD5s, a dash and their count. Raises `InvalidRequest`.

    A part that was stored without an MD5 counts with what its ETag has before the dash.
    """
    numbers = [number for number, _ in parts]
    if not numbers:
        raise InvalidRequest("the part list is empty", code="MalformedXML")
    if numbers != sorted(set(numbers)):
        raise InvalidRequest("the parts must be in ascending order", code="InvalidPartOrder")
    try:
        digests = b"".join(binascii.unhexlify(etag.partition("-")[0]) for _, etag in parts)
    except ValueError as error:
        raise InvalidRequest("a part's ETag is not that of any part", code="InvalidPart") from error
    return f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(numbers)}"


def _check_size(size_bytes: int, object_bytes_max: int) -> None:
    if size_bytes > object_bytes_max:
        raise InvalidRequest(
            f"the object would hold {size_bytes} bytes, limits.joined_object_bytes_max is "
            f"{object_bytes_max}",
            code="EntityTooLarge",
        )


def _attributes(
    of_upload: ObjectAttributes, request: CompleteUpload, parts: Sequence[ObjectInfo]
) -> ObjectAttributes:
    """What the upload was created with, and what is known of its parts."""
    return msgspec.structs.replace(
        of_upload,
        checksums=dict([request.checksum] if request.checksum else []),
        checksum_type=request.checksum_type if request.checksum else None,
        part_sizes_bytes=tuple(part.size_bytes for part in parts),
        part_checksums=request.part_checksums,
    )


def _made_before(engine: Engine, request: CompleteUpload, etag: str) -> ObjectInfo | None:
    try:
        info = engine.stat(request.bucket, request.key)
    except NotFound:
        return None
    return info if info.etag == etag else None


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
    parts: Sequence[ObjectInfo],
    etag: str,
    attributes: ObjectAttributes,
    copying: Copying,
) -> ObjectInfo:
    layout = engine.bucket(request.bucket).layout
    if layout is not None and sum(part.size_bytes for part in parts) != layout.chunk_bytes:
        raise Conflict("the object does not fit the bucket's KV layout", code="KvLayoutConflict")
    block_bytes = object_block_bytes(layout)
    staged = engine.stage_joined(request.bucket, request.key, BUCKET, parts, block_bytes)
    if staged is not None:
        return _commit(engine, request, StagedPut(staged, etag, attributes))
    with copying(sum(part.size_bytes for part in parts)):
        staged = engine.stage(request.bucket, request.key, block_bytes)
        try:
            _write_joined(engine, staged, parts, block_bytes)
            return _commit(engine, request, StagedPut(staged, etag, attributes))
        finally:
            staged.discard()


def _commit(engine: Engine, request: CompleteUpload, put: StagedPut) -> ObjectInfo:
    try:
        return engine.commit([put], request.condition)[0].info
    finally:
        put.staged.discard()


def _write_joined(
    engine: Engine, staged: Staged, parts: Sequence[ObjectInfo], block_bytes: int
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
