"""A request, as dispatch sees it: tokens for GPUs, bytes for NICs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from objectcache_dispatch.checks import check_at_least, check_name
from objectcache_schemas.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class DispatchRequest:
    """What one request reads and computes.

    `cached_tokens` are those whose KV is stored and read, `new_tokens` those that are prefilled.
    `read_bytes` is all that is read, `num_layers` layers of `layer_bytes` each.
    `compute_window_s` is how long a layer computes (c of docs/scheduling.md); None is not known,
    and then the last layer is what counts. `chunk_bytes` are one chunk's bytes of all layers; 0 is
    a delivery that cannot be split. `tenant` is for who asks, and changes no choice.
    """

    name: str
    cached_tokens: int
    new_tokens: int
    read_bytes: int
    layer_bytes: int
    num_layers: int
    compute_window_s: float | None = None
    tenant: str = ""
    chunk_bytes: int = 0

    def __post_init__(self) -> None:
        check_name("request's name", self.name)
        check_at_least(f"cached_tokens of request {self.name}", self.cached_tokens, 0)
        check_at_least(f"new_tokens of request {self.name}", self.new_tokens, 1)
        check_at_least(f"num_layers of request {self.name}", self.num_layers, 1)
        check_at_least(f"layer_bytes of request {self.name}", self.layer_bytes, 0)
        check_at_least(f"chunk_bytes of request {self.name}", self.chunk_bytes, 0)
        if self.read_bytes != self.layer_bytes * self.num_layers:
            raise InvalidRequest(
                f"read_bytes of request {self.name} is {self.read_bytes}; it must be num_layers x "
                f"layer_bytes = {self.layer_bytes * self.num_layers}"
            )
        if self.chunk_bytes and self.read_bytes % self.chunk_bytes:
            raise InvalidRequest(
                f"chunk_bytes of request {self.name} is {self.chunk_bytes}; read_bytes, "
                f"{self.read_bytes}, must be whole chunks"
            )
        if self.compute_window_s is not None:
            check_at_least(f"compute_window_s of request {self.name}", self.compute_window_s, 0)

    @property
    def tokens(self) -> int:
        """The prompt's tokens: tokens(r) and len(r) of section 6.1."""
        return self.cached_tokens + self.new_tokens

    def after(self, prefilled_tokens: int) -> DispatchRequest:
        """What is left once a part of it is prefilled: those tokens are cached, and none is read.

        Raises `InvalidRequest` where that would leave nothing.
        """
        check_at_least(f"prefilled tokens of request {self.name}", prefilled_tokens, 1)
        return replace(
            self,
            cached_tokens=self.cached_tokens + prefilled_tokens,
            new_tokens=self.new_tokens - prefilled_tokens,
            read_bytes=0,
            layer_bytes=0,
        )
