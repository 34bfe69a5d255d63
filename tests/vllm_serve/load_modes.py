"""How a vLLM is started so that the connector chooses a load mode by itself."""

from __future__ import annotations

from pathlib import Path

from tests.vllm_serve.served_vllm import Served
from tests.vllm_serve.store import Store

LAYERWISE, BEFORE_SCHEDULE = LOAD_MODES = ("layerwise", "before_schedule")


def served_in(mode: str, store: Store, model: Path) -> Served:
    """Engines of one mode share names of KV, those of the other mode have others."""
    transfer = store.connector(weights_revision=mode)
    return Served(model, transfer, asynchronous=mode == BEFORE_SCHEDULE)
