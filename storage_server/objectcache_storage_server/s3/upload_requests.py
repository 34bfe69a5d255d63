"""Requests on multipart uploads that take one answer, and their parts as quotas see them: blocking
functions over the engine.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from objectcache_schemas.errors import NotFound
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.messages.uploads import (
    AbortUpload,
    CreateUpload,
    Upload,
)
from objectcache_storage_server.engines.engine_calls import EngineCalls
from objectcache_storage_server.puts.put_means import PutMeans
from objectcache_storage_server.quotas.stored_ledger import Reservation, StoredLedger
from objectcache_storage_server.s3 import multipart


@dataclass(frozen=True, slots=True)
class UploadMeans:
    """What uploads are served with: their parts are puts, which count for the upload."""

    puts: PutMeans
    stored: StoredLedger
    # no part is counted while another one is
    counting: threading.Lock = field(default_factory=threading.Lock)

    @property
    def calls(self) -> EngineCalls:
        """As of puts."""
        return self.puts.calls


def abort_upload(means: UploadMeans, request: AbortUpload) -> Done:
    """`AbortUpload`."""
    name = multipart.UploadName(request.bucket, request.key, request.upload_id)
    multipart.abort_upload(means.calls.engine, name)
    means.stored.upload_ended(request.upload_id)
    return Done()


def create_upload(means: UploadMeans, request: CreateUpload) -> Upload:
    """`CreateUpload`: open an upload, which counts as the object that it will be."""
    bucket = means.calls.engine.bucket(request.bucket)
    with means.stored.reserving(bucket, 1, 0) as reservation:
        info = multipart.create_upload(
            means.calls.engine, request.bucket, request.key, request.attributes
        )
        means.stored.upload_opened(bucket, info.upload_id)
        means.stored.not_stored(reservation)
    return Upload(info=info)


def count_part(
    means: UploadMeans, upload: multipart.UploadName, part_number: int, reservation: Reservation
) -> None:
    """Count a part that was just stored, in place of what was reserved for it.

    Raises `NotFound` (NoSuchUpload) where the upload has ended meanwhile; the part is gone then.
    Whoever ends an upload deletes first it and then its parts, so one of the two sees the other.
    """
    engine = means.calls.engine
    key = multipart.part_key(upload.upload_id, part_number)
    with means.counting:  # so that the last to count sees what was stored last
        try:
            multipart.check_upload(engine, upload)
            size_bytes = engine.stat(multipart.BUCKET, key).size_bytes
        except NotFound as error:
            engine.delete(multipart.BUCKET, [key])
            means.stored.not_stored(reservation)
            raise NotFound("the upload has ended", code="NoSuchUpload") from error
        means.stored.part_stored(upload.upload_id, part_number, size_bytes)
        means.stored.not_stored(reservation)


def count_uploads(means: UploadMeans) -> None:
    """Count the uploads that are open when the server starts, and forget those without a bucket."""
    engine = means.calls.engine
    for name in list(multipart.open_uploads(engine)):
        try:
            means.stored.upload_opened(engine.bucket(name.bucket), name.upload_id)
        except NotFound:
            multipart.forget_upload(engine, name)
    for part in multipart.all_parts(engine):
        means.stored.part_stored(*part)
