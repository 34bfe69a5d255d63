"""What stands in the place of an engine's class where the engine is not installed."""

from __future__ import annotations

from typing import Any

from objectcache_schemas.errors import Unavailable


def missing_engine(engine: str, error: ImportError) -> Any:
    """A base class whose instances cannot be made: they raise `Unavailable` with what is missing.

    So a connector can be imported, and its types checked, without its engine.
    """
    reason = f"this connector needs {engine} in the same environment: {error}"

    class MissingEngine:
        def __init__(self, *_: object, **__: object) -> None:
            raise Unavailable(reason)

    return MissingEngine
