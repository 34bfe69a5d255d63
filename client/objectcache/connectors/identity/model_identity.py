"""Which model computed some KV: its name says neither which weights, nor how they were run."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from objectcache.connectors.identity.configuration_digest import configuration_digest
from objectcache.connectors.identity.model_files import (
    files_revision,
    hub_cache_of,
    model_directory,
)

UNRESOLVED = "unresolved"
HUB_REVISION = "main"  # what an engine loads that is given none

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
    configuration_of_weights: bool = True,
) -> ModelIdentity:
    """The identity of a model that an engine loads.

    `model` is the path or the hub's name that is loaded, never an alias that it is served under.
    `given_revision` is the setting `weights_revision`. Where it is empty, the revision is the hub's
    commit, which the path has, or `revision` leads to in the hub's cache on this host (found by
    `environment`), or `configuration` was loaded at; or for a directory a digest of its weight
    files' names, sizes and times. An engine that does not tell its `revision` (None) has that of
    the cache's only snapshot, and none where there are several. Where nothing tells, the log says
    so in a warning: weights that change under the name would then find the old ones' KV.

    `configuration` is the model's as the engine loaded it, a mapping or a Hugging Face object;
    without it the `config.json` on this host counts. Its commit counts for the weights only with
    `configuration_of_weights`: an engine may take it from another repository. `options` are the
    engine's own that change KV, such as quantisation.
    """
    directory = model_directory(model, revision, hub_cache_of(environment))
    if configuration is None:
        configuration = _configuration_of(directory)
    commit = getattr(configuration, "_commit_hash", None) if configuration_of_weights else None
    return ModelIdentity(
        model,
        given_revision or _resolved(model, directory, commit, revision),
        configuration_digest(configuration, options),
    )


def _resolved(
    model: str, directory: Path | None, configuration_commit: str | None, revision: str | None
) -> str:
    """Both of what is known where the configuration was loaded at another commit than the files
    are of: a branch may have moved since.
    """
    of_files = None if directory is None else files_revision(directory)
    of_configuration = f"commit {configuration_commit}" if configuration_commit else None
    if found := {part for part in (of_files, of_configuration) if part}:
        return " ".join(sorted(found))
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
