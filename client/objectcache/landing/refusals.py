"""What an error of a request with a target says about the memory, and about trying without one."""

from __future__ import annotations

from objectcache_schemas.errors import ObjectCacheError, Unavailable


def was_refused(error: BaseException) -> bool:
    """Whether the error means that the server does not touch the memory, and never will.

    An outage says nothing of it, nor does a defect: an answer that makes no sense may follow an
    accepted request, and a proxy's own error stands for a server that may still be at work.
    """
    return isinstance(error, ObjectCacheError) and error.code not in (
        Unavailable.default_code,
        ObjectCacheError.default_code,
    )


def is_going(error: ObjectCacheError) -> bool:
    """Whether the storage server of the session has refused because it goes: another one may take
    the same.
    """
    return error.code == "Draining"


def may_fall_back(error: ObjectCacheError) -> bool:
    """Whether the same may go well by body. A target is unknown where another server has taken
    over since it was registered.
    """
    return isinstance(error, Unavailable) or error.code == "NoSuchTarget"
