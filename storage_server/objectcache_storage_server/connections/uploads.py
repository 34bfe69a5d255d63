"""Requests on multipart uploads that take one answer: blocking functions over the engine."""

from __future__ import annotations

import msgspec

from objectcache_schemas.messages import (
    AbortUpload,
    CompleteUpload,
    CopyPart,
    CreateUpload,
    Done,
    ListParts,
    ListUploads,
    Stored,
    Upload,
)
from objectcache_storage_server import multipart
from objectcache_storage_server.joining import complete_upload
from objectcache_storage_server.service import Service

UploadRequest = CreateUpload | CopyPart | CompleteUpload | AbortUpload | ListParts | ListUploads


def answer_upload(service: Service, request: UploadRequest) -> msgspec.Struct:
    """The reply to a request on uploads."""
    engine = service.engine
    match request:
        case CreateUpload():
            info = multipart.create_upload(engine, request.bucket, request.key, request.attributes)
            return Upload(info=info)
        case CopyPart():
            return _copy_part(service, request)
        case CompleteUpload():
            return _complete(service, request)
        case AbortUpload():
            name = multipart.UploadName(request.bucket, request.key, request.upload_id)
            multipart.abort_upload(engine, name)
            service.stored.upload_ended(request.upload_id)
            return Done()
        case ListParts():
            return multipart.list_parts(engine, request)
        case ListUploads():
            return multipart.list_uploads(engine, request)


def _copy_part(service: Service, request: CopyPart) -> Stored:
    bucket = service.engine.bucket(request.bucket)
    with service.stored.reserving(bucket, 0, request.length_bytes):
        info = multipart.copy_part(service.engine, request)
        service.stored.part_stored(
            request.bucket, request.upload_id, request.part_number, info.size_bytes
        )
    return Stored(info=info)


def _complete(service: Service, request: CompleteUpload) -> Stored:
    """The parts' bytes become the object's: they were reserved when the parts came."""
    bucket = service.engine.bucket(request.bucket)
    bytes_max = service.limits.joined_object_bytes_max
    with service.stored.reserving(bucket, 1, 0):
        info = complete_upload(service.engine, request, bytes_max)
    service.stored.upload_ended(request.upload_id)
    return Stored(info=info)
