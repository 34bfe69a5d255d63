"""When a request's stored KV is loaded: while the engine computes on it, or before."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from objectcache_schemas.errors import InvalidRequest

logger = logging.getLogger("objectcache.connectors.vllm")


class LoadMode(StrEnum):
    """`layerwise`: a request is scheduled at once, and each layer waits for its KV. What a step has
    computed on a load that fails must be undone, which is vLLM's work.

    `before_schedule`: a request is scheduled when its KV is in its blocks. Nothing is ever undone.

    `per_request`: `before_schedule` for requests whose KV would hold a step up for longer than a
    step takes, `layerwise` for others; where vLLM does not undo rightly, the former for all.

    `auto`: `layerwise` where vLLM undoes it rightly.
    """

    AUTO = "auto"
    LAYERWISE = "layerwise"
    BEFORE_SCHEDULE = "before_schedule"
    PER_REQUEST = "per_request"

    @classmethod
    def parse(cls, value: object) -> LoadMode:
        """Raises `InvalidRequest` for another word."""
        try:
            return cls(value)  # type: ignore[arg-type]
        except ValueError:
            words = ", ".join(cls)
            raise InvalidRequest(
                f"connector setting 'load_mode' must be one of {words}, got {value!r}"
            ) from None


@dataclass(frozen=True, slots=True)
class EngineSteps:
    """How an engine runs its steps, as far as it decides what a failed load leaves behind."""

    asynchronous: bool
    pipeline_ranks: int
    second_runner: bool

    @classmethod
    def of(cls, vllm_config: Any) -> EngineSteps:
        """As vLLM's configuration says, once it is complete."""
        return cls(
            asynchronous=bool(vllm_config.scheduler_config.async_scheduling),
            pipeline_ranks=vllm_config.parallel_config.pipeline_parallel_size,
            second_runner=bool(getattr(vllm_config, "use_v2_model_runner", False)),
        )

    def dangers(self) -> list[str]:
        """What vLLM does wrong here after a load that failed while the engine computed on it."""
        found = []
        if self.asynchronous:
            found.append(
                "asynchronous scheduling: the engine may end, or a token of the step behind, "
                "computed on wrong KV, stays in the answer"
            )
        if self.pipeline_ranks > 1:
            found.append(
                "pipeline ranks: a token of a step behind, computed on wrong KV, stays in the "
                "answer"
            )
        if self.second_runner:
            found.append(
                "the V2 model runner: it computes the blocks again from wrong positions, and the "
                "answer goes on from that"
            )
        return found


def chosen_mode(setting: LoadMode, steps: EngineSteps) -> LoadMode:
    """The mode of an engine: never `auto`."""
    if setting in (LoadMode.LAYERWISE, LoadMode.BEFORE_SCHEDULE):
        return setting
    if steps.dangers():
        return LoadMode.BEFORE_SCHEDULE
    return LoadMode.LAYERWISE if setting is LoadMode.AUTO else setting


def tell_mode(setting: LoadMode, steps: EngineSteps) -> None:
    """Say in the log which mode it is, why, and how to have the other."""
    mode, dangers = chosen_mode(setting, steps), "; ".join(steps.dangers())
    if mode is LoadMode.LAYERWISE and dangers:
        logger.warning(
            "load_mode is layerwise, and after a load that fails vLLM goes wrong with %s. With "
            "load_mode before_schedule, which auto chooses here, neither can happen",
            dangers,
        )
    elif setting is LoadMode.AUTO and mode is LoadMode.LAYERWISE:
        logger.info(
            "load_mode is layerwise: layers are loaded while the engine computes. load_mode "
            "before_schedule loads a request's KV before it is scheduled"
        )
    elif setting is LoadMode.PER_REQUEST and mode is setting:
        logger.info(
            "load_mode is per_request: a request's KV is loaded before it is scheduled where it "
            "would hold a step up for longer than a step takes, else while the engine computes"
        )
    elif setting is not mode:
        logger.info(
            "load_mode is before_schedule: with layerwise a load that fails would go wrong in "
            "vLLM with %s. load_mode layerwise has it all the same",
            dangers,
        )
