"""A body that is a descriptor, over its limit."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import Limits


def descriptor_too_large(limits: Limits) -> InvalidRequest:
    """What is raised for more than a descriptor may have."""
    return InvalidRequest(
        f"the descriptor is over limits.descriptor_bytes_max, {limits.descriptor_bytes_max} bytes",
        code="DescriptorTooLarge",
    )


@contextmanager
def bounded_descriptor(limits: Limits) -> Generator[None]:
    """Within it a body of descriptor_bytes_max at most is read: over that it is
    `descriptor_too_large`.
    """
    try:
        yield
    except InvalidRequest as error:
        if error.code != "EntityTooLarge":
            raise
        raise descriptor_too_large(limits) from error
