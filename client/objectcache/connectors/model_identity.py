"""Which model computed some KV: its name says neither which weights, nor how they were run."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from objectcache.connectors.configuration_digest import configuration_digest
from objectcache.connectors.model_files import (
    commit_of_path,
    files_digest,
    hub_cache_of,
    model_directory,
)

UNRESOLVED = "unresolved"

_logger = logging.getLogger("objectcache.connectors")


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What of a model is in every key: as it was named to the engine, which weights, and a digest
    of how they are run.
    """

    model: str
    weights_revision: str
    configuration: str


def identify(
    model: str,
    given_revision: str,
    environment: Mapping[str, str],
    *,
    configuration: Any = None,
    options: Mapping[str, object] | None = None,
    revision: str | None = None,
) -> ModelIdentity:
    """The identity of a model that an engine loads.

    `model` is the path or the hub's name that is loaded, never an alias that it is served under.
    `given_revision` is the setting `weights_revision`. Where it is empty, the revision is the hub's
    commit, which `configuration` or the path has, or `revision` has led to in the hub's cache on
    this host (found by `environment`); or for a directory a digest of its weight files' names,
    sizes and times. Where nothing tells, the log says so in a warning: weights that change under
    the name would then find the old ones' KV.

    `configuration` is the model's as the engine loaded it, a mapping or a Hugging Face object;
    without it the `config.json` on this host counts. `options` are the engine's own that change KV,
    such as quantisation.
    """
    directory = model_directory(model, revision, hub_cache_of(environment))
    if configuration is None:
        configuration = _configuration_of(directory)
    return ModelIdentity(
        model,
        given_revision or _resolved(model, directory, configuration, revision),
        configuration_digest(configuration, options),
    )


def _resolved(model: str, directory: Path | None, configuration: Any, revision: str | None) -> str:
    commit = getattr(configuration, "_commit_hash", None)
    if not commit and directory is not None:
        commit = commit_of_path(directory)
    if commit:
        return f"commit {commit}"
    if directory is not None and (digest := files_digest(directory)):
        return f"files {digest}"
    _logger.warning(
        "NOTHING TELLS WHICH WEIGHTS %s HAS: set the connector's weights_revision, and change it "
        "with the weights; else KV that other weights under this name computed is taken for theirs",
        model,
    )
    return f"{UNRESOLVED} {revision or ''}".strip()


def _configuration_of(directory: Path | None) -> Any:
    if directory is None:
        return {}
    try:
        return json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
