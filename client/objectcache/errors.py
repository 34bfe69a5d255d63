"""The errors that the client raises; docs/errors.md says what each code means."""

from objectcache_schemas.errors import (
    AccessDenied,
    Busy,
    Conflict,
    DamagedData,
    DeliveryFailed,
    ErrorDetails,
    InvalidRequest,
    NotFound,
    ObjectCacheError,
    PreconditionFailed,
    StorageFull,
    Unavailable,
    Unsupported,
)

__all__ = [
    "AccessDenied",
    "Busy",
    "Conflict",
    "DamagedData",
    "DeliveryFailed",
    "ErrorDetails",
    "InvalidRequest",
    "NotFound",
    "ObjectCacheError",
    "PreconditionFailed",
    "StorageFull",
    "Unavailable",
    "Unsupported",
]
