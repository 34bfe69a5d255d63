"""The connector's lines in vLLM's log: with its time, process and level, and with their own name.

vLLM gives handlers to its own logger alone. Lines of other loggers would come out bare, and those
below a warning not at all.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Generator
from contextlib import contextmanager

from objectcache_schemas.errors import ObjectCacheError

OWN = "objectcache"
ENGINE = "vllm"
logger = logging.getLogger("objectcache.connectors.vllm")


class ThroughEngine(logging.Handler):
    """Hands records to whatever handlers the engine's logger has, with the logger's name before the
    message: vLLM's format has none.
    """

    def __init__(self, engine: logging.Logger) -> None:
        super().__init__()
        self._engine = engine

    def emit(self, record: logging.LogRecord) -> None:
        """Pass it on to those that take its level."""
        named = copy.copy(record)
        named.msg, named.args = f"{record.name}: {record.getMessage()}", None
        for handler in self._engine.handlers:
            if named.levelno >= handler.level:
                handler.handle(named)


def log_through_engine(
    own: logging.Logger | None = None,
    engine: logging.Logger | None = None,
    root: logging.Logger | None = None,
) -> None:
    """Send our lines where vLLM's go, at vLLM's level. Repeating has no effect.

    Nothing is done where somebody has configured logging for us: where our logger or the root
    logger has handlers, or vLLM's has none.
    """
    own = own or logging.getLogger(OWN)
    engine = engine or logging.getLogger(ENGINE)
    root = root or logging.getLogger()
    if own.handlers or root.handlers or not engine.handlers:
        return
    own.addHandler(ThroughEngine(engine))
    own.propagate = False
    if own.level == logging.NOTSET:
        own.setLevel(engine.getEffectiveLevel())


@contextmanager
def start_told(what: str) -> Generator[None]:
    """Say in one line what keeps `what` from starting: vLLM prints the tracebacks of several
    processes around it.
    """
    try:
        yield
    except ObjectCacheError as error:
        logger.error("%s cannot start: %s", what, error.message)
        raise
