"""Records as documents for programs: every field is there, also those at their defaults. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


def full_document(value: Any) -> Any:
    """The value with its structs as maps of all their fields; text and numbers as they are."""
    if isinstance(value, msgspec.Struct):
        return {name: full_document(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, Mapping):
        return {name: full_document(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [full_document(one) for one in value]
    return value
