"""How long a Transformers model computes on a layer: learned of its prefills, and told to the
server with the fetch and while the model runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from objectcache.connectors.identity.namespace import compute_fingerprint
from objectcache.connectors.timing.compute_windows import BatchShape
from objectcache.connectors.timing.moments import clock_of
from objectcache.connectors.timing.step_windows import Step, StepWindows
from objectcache.deliveries.delivery import Delivery
from objectcache.kv_bucket import KvBucket
from objectcache.landing.targets import Target
from objectcache_schemas.errors import InvalidRequest


class LayerTimings:
    """Of one model on one device; kept as long as the model. For one thread at a time.

    A layer is computed from the moment at which the cache gives it its KV until the next one asks.
    Prefills of a `LayerwiseCache` without chunks teach as well.
    """

    def __init__(self, model: Any, compute_profile: str = "") -> None:
        """`model` has a `device` and a `config`. `compute_profile` names a profile that the server
        has for it, in the place of the name that the model was loaded by.
        """
        name = getattr(model.config, "name_or_path", "") or model.config.model_type
        self.fingerprint = compute_profile or compute_fingerprint(str(name), 1)
        self._windows = StepWindows(clock_of(model.device))

    def fetch(
        self,
        bucket: KvBucket,
        chunk_keys: Sequence[str],
        prompt_tokens: int,
        *,
        target: Target | None = None,
    ) -> Delivery:
        """As `bucket.fetch`, layer by layer, of a prompt of so many tokens whose rest the model is
        about to compute. Raises what that raises, and `InvalidRequest` where nothing is left.
        """
        cached_tokens = len(chunk_keys) * bucket.layout.chunk_tokens
        computed_tokens = prompt_tokens - cached_tokens
        if computed_tokens < 1:
            raise InvalidRequest(
                f"a prompt of {prompt_tokens} tokens leaves nothing to compute behind "
                f"{cached_tokens}: a model computes one token at least"
            )
        return bucket.fetch(
            chunk_keys,
            delivery="layerwise",
            compute_window_s=self._windows.expected_s(
                BatchShape.of([(computed_tokens, cached_tokens)])
            ),
            context_tokens=prompt_tokens,
            fingerprint=self.fingerprint,
            computed_tokens=computed_tokens,
            target=target,
        )

    def prefill_begins(self, delivery: Delivery, computed: int, before: int) -> None:
        """The model computes so many tokens behind as many."""
        step = Step(BatchShape.of([(computed, before)]))
        step.joins(delivery.reports)
        self._windows.step_begins(step)

    def wait_begins(self) -> None:
        """The model wants its next layer's KV."""
        self._windows.wait_begins()

    def wait_ended(self, layer: int, *, is_last: bool) -> None:
        """The model computes this layer from now on."""
        self._windows.wait_ended(layer, ends_unseen=is_last)

    def __repr__(self) -> str:
        return f"<LayerTimings {self.fingerprint}, {self._windows!r}>"
