"""What the engines are asked: the paper's workload C, without the request that takes nine seconds.

Bytes are divided by SCALE, and so is the cap; times are the paper's. An engine's KV has 4 KiB a
block of 16 tokens and layer, a sixteenth of Llama 3.1 8B's, so its prompts have a quarter of the
paper's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.figures.paper_data import REQUESTS, WORKLOADS, PaperRequest

TOKENS_SCALE = 4
SCALE = 64  # of bytes, and of the cap
CAP_GBPS = WORKLOADS["C"].cap_gbps / SCALE
LEFT_OUT = ("64K, 50%",)


@dataclass(frozen=True, slots=True)
class LinkRequest:
    """One engine's request, again and again: a stored prefix, and tokens that are computed."""

    name: str
    cached_tokens: int
    computed_tokens: int
    window_s: float

    @classmethod
    def of(cls, paper: PaperRequest) -> LinkRequest:
        """The paper's request in the engine's tokens."""
        cached = paper.cached_tokens // TOKENS_SCALE
        return cls(
            paper.name, cached, paper.context_tokens // TOKENS_SCALE - cached, paper.window_s
        )

    @property
    def tokens(self) -> int:
        """Of the whole prompt."""
        return self.cached_tokens + self.computed_tokens


FULL = tuple(
    LinkRequest.of(REQUESTS[name]) for name in WORKLOADS["C"].rates_gbps if name not in LEFT_OUT
)
QUICK = tuple(LinkRequest.of(REQUESTS[name]) for name in ("4K, 50%", "4K, 87.5%", "16K, 87.5%"))
