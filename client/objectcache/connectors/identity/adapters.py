"""LoRA adapters: engines hash their names and paths, which do not tell what is in the files."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from objectcache.connectors.identity.model_files import (
    files_revision,
    hub_cache_of,
    model_directory,
)

ADAPTERS_MAX = 4096  # remembered; requests with others are left alone
NO_ADAPTER = ""

_logger = logging.getLogger("objectcache.connectors")


def adapter_revision(path: str, environment: Mapping[str, str]) -> str | None:
    """The hub's commit of an adapter, or for a directory a digest of its files' names, sizes and
    times; None where this host has no such files, or the hub's cache has several versions.
    """
    directory = model_directory(path, None, hub_cache_of(environment))
    return None if directory is None else files_revision(directory)


class Adapters:
    """The revisions of the adapters that an engine's requests use.

    A scheduler is not told when its workers read an adapter's files. So the files are looked at
    with each request, and an adapter whose files change under its name and path has no revision
    from then on: which of them computed the KV in the engine's blocks cannot be known. Called from
    the scheduler's thread alone.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._known: dict[tuple[str, str], str | None] = {}
        self._told_of: set[tuple[str, str]] = set()

    def revision_of(self, lora_request: Any) -> str | None:
        """`NO_ADAPTER` for a request without one; None where KV must be neither used nor stored,
        which the log says once for each adapter.
        """
        if lora_request is None:
            return NO_ADAPTER
        adapter = (str(lora_request.lora_name), str(lora_request.lora_path))
        found = adapter_revision(adapter[1], self._environment)
        if found is None:
            self._leave(adapter, "its files are not known on this host")
            return None
        if adapter not in self._known:
            if len(self._known) >= ADAPTERS_MAX:
                self._leave(adapter, f"{ADAPTERS_MAX} others are known already")
                return None
            self._known[adapter] = found
        if self._known[adapter] == found:
            return found
        self._known[adapter] = None
        self._leave(adapter, "its files were changed in place; give it another path")
        return None

    def _leave(self, adapter: tuple[str, str], why: str) -> None:
        if adapter not in self._told_of and len(self._told_of) < ADAPTERS_MAX:
            self._told_of.add(adapter)
            _logger.warning(
                "KV of requests with the adapter %s (%s) is neither loaded nor stored: %s",
                *adapter,
                why,
            )

    def __repr__(self) -> str:
        return f"<Adapters {len(self._known)} known>"
