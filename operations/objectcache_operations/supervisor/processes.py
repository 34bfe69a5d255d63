"""How the servers are started: as modules of this interpreter, never by import.

A serving engine that installs the client does not have the servers' packages; what is missing is
found here, before anything is started.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import NoReturn

DISTRIBUTION = "objectcache"
GATEWAY_MODULE = "objectcache_gateway"
ADMIN_MODULE = "objectcache_gateway.admin"
DISPATCH_MODULE = "objectcache_gateway.dispatch_service"
STORAGE_MODULE = "objectcache_storage_server"
RELAY_MODULE = "objectcache_relay"
FETCHER_MODULE = "objectcache_relay.fetcher"
GATEWAY_EXTRA = "gateway"
STORAGE_EXTRA = "storage"

_REQUIREMENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_EXTRA_MARKER = re.compile(r"""extra == ['"]([^'"]+)['"]""")


def module_command(module: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """Command line that runs `module` with this interpreter.

    -P keeps the current directory out of the import path: whatever lies where the user stands must
    not shadow a module of the server.
    """
    return (sys.executable, "-P", "-m", module, *arguments)


def replace_process(module: str, arguments: Sequence[str]) -> NoReturn:
    """Become `module`, in this process' place."""
    command = module_command(module, arguments)
    os.execv(command[0], command)  # noqa: S606 - no shell is wanted


def server_arguments(
    config: str | None, data_dir: str | None, assignments: Sequence[str]
) -> tuple[str, ...]:
    """The settings flags that both servers take."""
    arguments: list[str] = []
    if config is not None:
        arguments += ["--config", config]
    if data_dir is not None:
        arguments += ["--data-dir", data_dir]
    for assignment in assignments:
        arguments += ["--set", assignment]
    return tuple(arguments)


def missing_distributions(extras: Iterable[str]) -> list[str]:
    """Distributions that these extras of ours need and that are not installed."""
    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return []  # run from a bare source tree: the servers' own import errors must do
    needed = {name for extra in extras for name in required_by(requirements, extra)}
    return sorted(name for name in needed if not _is_installed(name))


def required_by(requirements: Iterable[str], extra: str) -> list[str]:
    """Names of the requirements that belong to `extra`, from a distribution's metadata."""
    names: list[str] = []
    for requirement in requirements:
        name, marker = _REQUIREMENT_NAME.match(requirement), _EXTRA_MARKER.search(requirement)
        if name and marker and marker[1] == extra:
            names.append(name[0])
    return names


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
