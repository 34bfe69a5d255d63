"""Requests on multipart uploads that take one answer, and their parts as quotas see them: blocking
functions over the engine.
"""

from __future__ import annotations

from objectcache_schemas.errors import NotFound
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.messages.uploads import (
    AbortUpload,
    CreateUpload,
    Upload,
)
from objectcache_storage_server.accounts.stored_ledger import Reservation
from objectcache_storage_server.s3 import multipart
from objectcache_storage_server.service import Service


def abort_upload(service: Service, request: AbortUpload) -> Done:
    """`AbortUpload`."""
    name = multipart.UploadName(request.bucket, request.key, request.upload_id)
    multipart.abort_upload(service.engine, name)
    service.stored.upload_ended(request.upload_id)
    return Done()


def create_upload(service: Service, request: CreateUpload) -> Upload:
    """`CreateUpload`: open an upload, which counts as the object that it will be."""
    bucket = service.engine.bucket(request.bucket)
    with service.stored.reserving(bucket, 1, 0) as reservation:
        info = multipart.create_upload(
            service.engine, request.bucket, request.key, request.attributes
        )
        service.stored.upload_opened(bucket, info.upload_id)
        service.stored.not_stored(reservation)
    return Upload(info=info)


def count_part(
    service: Service, upload: multipart.UploadName, part_number: int, reservation: Reservation
) -> None:
    """Count a part that was just stored, in place of what was reserved for it.

    Raises `NotFound` (NoSuchUpload) where the upload has ended meanwhile; the part is gone then.
    Whoever ends an upload deletes first it and then its parts, so one of the two sees the other.
    """
    engine = service.engine
    key = multipart.part_key(upload.upload_id, part_number)
    with service.counting_parts:  # so that the last to count sees what was stored last
        try:
            multipart.check_upload(engine, upload)
            size_bytes = engine.stat(multipart.BUCKET, key).size_bytes
        except NotFound as error:
            engine.delete(multipart.BUCKET, [key])
            service.stored.not_stored(reservation)
            raise NotFound("the upload has ended", code="NoSuchUpload") from error
        service.stored.part_stored(upload.upload_id, part_number, size_bytes)
        service.stored.not_stored(reservation)


def count_uploads(service: Service) -> None:
    """Count the uploads that are open when the server starts, and forget those without a bucket."""
    engine = service.engine
    for name in list(multipart.open_uploads(engine)):
        try:
            service.stored.upload_opened(engine.bucket(name.bucket), name.upload_id)
        except NotFound:
            multipart.forget_upload(engine, name)
    for part in multipart.all_parts(engine):
        service.stored.part_stored(*part)
