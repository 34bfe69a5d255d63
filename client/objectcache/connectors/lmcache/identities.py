"""The models whose chunks LMCache stores: it tells their names alone."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from objectcache.connectors.identity.model_identity import ModelIdentity, identify

MODELS_MAX = 1024  # remembered; the files of others are looked at with every task


class Identities:
    """Identities of models by LMCache's names for them: the paths that vLLM loads. Thread-safe.

    LMCache does not tell with which revision: a name of the hub is known by the only snapshot in
    the hub's cache on this host, and where there are several the log asks for `weights_revision`.

    A model is looked at once, when it is first named: the weights that an engine has loaded are
    those of that time.
    """

    def __init__(self, weights_revision: str, environment: Mapping[str, str]) -> None:
        self._weights_revision = weights_revision
        self._environment = environment
        self._lock = threading.Lock()
        self._known: dict[str, ModelIdentity] = {}

    def of(self, model: str) -> ModelIdentity:
        """The identity of a model."""
        if (known := self._known.get(model)) is not None:
            return known
        identity = identify(model, self._weights_revision, self._environment)
        with self._lock:
            if len(self._known) >= MODELS_MAX:
                return identity
            return self._known.setdefault(model, identity)

    def __repr__(self) -> str:
        return f"<Identities of {len(self._known)} models>"
