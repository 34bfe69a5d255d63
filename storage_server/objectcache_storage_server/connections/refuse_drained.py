"""What a drained server refuses, beside deliveries: objects, uploads and buckets stay as they are.

Accounts, pins and the schedule are an operator's, and may change.
"""

from __future__ import annotations

from objectcache_schemas.conversations import GatewayRequest
from objectcache_schemas.messages.buckets import (
    ConfigureBucket,
    CreateBucket,
    DeleteBucket,
    SetLayout,
    SetPolicy,
)
from objectcache_schemas.messages.quotas import CheckPut
from objectcache_schemas.messages.uploads import AbortUpload, CompleteUpload, CreateUpload
from objectcache_schemas.messages.writes import (
    CopyObject,
    CopyPart,
    DeleteObjects,
    ReplaceAttributes,
)
from objectcache_storage_server.admission.entrance import drained
from objectcache_storage_server.service import Service

# The puts and the gets are missing: they are refused where they are admitted.
CHANGES = (
    *(CreateBucket, DeleteBucket, SetLayout, SetPolicy, ConfigureBucket),
    *(CheckPut, CopyObject, ReplaceAttributes, DeleteObjects),
    *(CreateUpload, CopyPart, CompleteUpload, AbortUpload),
)


def check_not_drained(service: Service, request: GatewayRequest) -> None:
    """Raise `Unavailable` for a change to a drained server."""
    if service.entrance.drained and isinstance(request, CHANGES):
        raise drained()
