"""The library's modules, imported when verbs are used: pyverbs of rdma-core 44 and later.

pyverbs is bound to the system's libibverbs, so the system's package is the one to install; the
wheel that a package index builds loads only beside the same version of rdma-core.
"""

from __future__ import annotations

import functools
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from objectcache_schemas.errors import Unavailable

HOW_TO_GET_IT = (
    "install the system's package (Debian and Ubuntu: python3-pyverbs) for this interpreter's "
    "version, and make it importable here"
)


class Pyverbs(NamedTuple):
    """The modules, under the names that they have in current versions."""

    enums: Any
    addr: Any
    cq: Any
    device: Any
    mr: Any
    pd: Any
    qp: Any
    wr: Any
    error: type[Exception]  # the base of what the library raises


@functools.cache
def load_pyverbs() -> Pyverbs:
    """Import the library. Raises `Unavailable`, with what to install."""
    try:
        error: Any = import_module("pyverbs.pyverbs_error")
        return Pyverbs(
            _enums(),
            import_module("pyverbs.addr"),
            import_module("pyverbs.cq"),
            import_module("pyverbs.device"),
            import_module("pyverbs.mr"),
            import_module("pyverbs.pd"),
            import_module("pyverbs.qp"),
            import_module("pyverbs.wr"),
            error.PyverbsError,
        )
    except ImportError as missing:
        raise Unavailable(f"verbs need pyverbs ({missing}): {HOW_TO_GET_IT}") from missing


def _enums() -> ModuleType:
    try:
        return import_module("pyverbs.libibverbs_enums")
    except ImportError:
        return import_module("pyverbs.enums")  # before rdma-core 57


@contextmanager
def translated(what: str) -> Generator[None]:
    """Raise `Unavailable`, saying what could not be done, for whatever the library raises."""
    try:
        yield
    except load_pyverbs().error as error:
        raise Unavailable(f"verbs: {what}: {error}") from error
