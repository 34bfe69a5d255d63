"""Which prefixes are fetched: model shapes, lengths, chunk sizes, and what computing them takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.basis.prefix import LAYERS, LLAMA_TOKEN_BYTES, MLA_TOKEN_BYTES, Geometry
from benchmarks.figures.paper_data import NUM_LAYERS, REQUESTS, PaperRequest

MLA_LAYERS = 61  # DeepSeek-V3
# Paper, Table A8. Table A1's 12.5 % is of other runs.
_ROWS = [request for request in REQUESTS.values() if "12.5" not in request.name]


@dataclass(frozen=True, slots=True)
class Model:
    """What decides the size of a KV cache; `token_bytes` is a token's in one layer."""

    name: str
    num_layers: int
    token_bytes: int


LLAMA = Model("Llama-3.1-8B-like", LAYERS, LLAMA_TOKEN_BYTES)
MLA = Model("MLA-like (DeepSeek-V3)", MLA_LAYERS, MLA_TOKEN_BYTES)


@dataclass(frozen=True, slots=True)
class Cell:
    """One prefix: `tokens` of `model` in chunks of `chunk_tokens`."""

    model: Model
    tokens: int
    chunk_tokens: int

    @property
    def geometry(self) -> Geometry:
        """Its chunks."""
        return Geometry(
            self.chunk_tokens,
            self.tokens // self.chunk_tokens,
            self.model.token_bytes,
            self.model.num_layers,
        )

    @property
    def payload_bytes(self) -> int:
        """Bytes of the prefix."""
        return self.geometry.payload_bytes

    @property
    def paper_request(self) -> PaperRequest:
        """The row of Table A8 whose cached prefix is nearest in length, as a ratio."""
        return min(_ROWS, key=lambda row: abs(math.log(row.cached_tokens / self.tokens)))

    @property
    def compute_window_s(self) -> float:
        """Computing time of a layer: that row's, shared by the model's layers.

        The paper's windows are of 32 layers; a model of more layers takes as long in all.
        """
        return self.paper_request.window_s * NUM_LAYERS / self.model.num_layers

    def __str__(self) -> str:
        return f"{self.model.name}, {self.tokens} tokens, G={self.chunk_tokens}"


JUDGED = Cell(LLAMA, 4096, 16)
QUICK: Sequence[Cell] = (JUDGED, Cell(MLA, 1024, 64))
FULL: Sequence[Cell] = (
    *(Cell(LLAMA, tokens, size) for tokens in (1024, 4096, 8192) for size in (16, 64, 256)),
    *(Cell(MLA, 4096, size) for size in (16, 64, 256)),
    *(Cell(MLA, tokens, 64) for tokens in (1024, 8192)),
)
