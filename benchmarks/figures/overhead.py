"""Figure 13: TTFT over the optimal local layerwise baseline, for each path and chunk size."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from benchmarks.figures.experiment import Context, Experiment
from benchmarks.figures.gpu import Prefill
from benchmarks.figures.local import LocalChunks, LocalLayers
from benchmarks.figures.paper_data import NUM_LAYERS, REQUESTS, PaperRequest
from benchmarks.figures.plots import grouped_bars, panels
from benchmarks.figures.scaled import QUICK_LAYERS, ScaledRequest, schedule
from benchmarks.figures.served import Served, served

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OPTIMAL = "opt-local-LW"
AGG = "S3Agg-LW"
BATCH = "S3Batch-CW"
LOCAL_LAYERWISE = "Local-DRAM-LW"
LOCAL_CHUNKWISE = "Local-DRAM-CW"
PATHS = (LOCAL_CHUNKWISE, LOCAL_LAYERWISE, BATCH, AGG)
FIGURE_REQUESTS = tuple(
    REQUESTS[f"{context}, {hit_rate}"]
    for context in ("4K", "64K")
    for hit_rate in ("12.5%", "50%", "87.5%")
)
QUICK_REQUESTS = tuple(REQUESTS[name] for name in ("4K, 50%", "4K, 87.5%", "64K, 87.5%"))
CHUNK_TOKENS = (16, 64, 256)
QUICK_CHUNK_TOKENS = (64,)
SHORT_TOKENS = 8192  # requests below this are measured several times
REPEATS_SHORT, REPEATS_LONG, REPEATS_QUICK = 9, 1, 3
GOAL_CHUNK_TOKENS = 64
GOAL_LONG = 0.01  # of opt-local-LW
GOAL_SHORT_MS = 5.0
EPOCH_S = 0.01


@dataclass(frozen=True, slots=True)
class OverheadRow:
    """One path for one request; times are medians."""

    request: str
    chunk_tokens: int
    path: str
    samples: int
    ttft_ms: float
    over_ms: float  # opt-local-LW
    over_percent: float
    first_layer_ms: float  # from the beginning until it is in the GPU's memory
    compute_ms: float
    payload_mib: float


class OverheadExperiment(Experiment[OverheadRow]):
    """Figure 13, with the link as fast as this machine is."""

    name: ClassVar[str] = "overhead"
    title: ClassVar[str] = "Figure 13: TTFT over opt-local-LW"

    def run(self, context: Context) -> list[OverheadRow]:
        with served(context.bench) as store:
            store.schedule(schedule("stall_dynamic", 0.0, context.scale, EPOCH_S))
            rows: list[OverheadRow] = []
            for request in requests_of(context):
                context.say(str(request))
                rows += _measure(store, request, _repeats(context, request.paper))
        return rows

    def plot(self, rows: Sequence[OverheadRow]) -> Figure:
        requests = list(dict.fromkeys(row.request for row in rows))
        chunk_tokens = sorted({row.chunk_tokens for row in rows})
        figure, axes = panels(-(-len(requests) // 3), min(3, len(requests)))
        for request, panel in zip(requests, axes, strict=False):
            by_key = {(row.chunk_tokens, row.path): row for row in rows if row.request == request}
            series = {
                path: [by_key[tokens, path].over_percent for tokens in chunk_tokens]
                for path in PATHS
            }
            grouped_bars(panel, [f"G={tokens}" for tokens in chunk_tokens], series)
            compute_ms = by_key[chunk_tokens[0], AGG].compute_ms
            panel.set_title(f"{request} (compute {compute_ms:,.0f} ms)")
            panel.set_ylabel(f"TTFT over {OPTIMAL}, %")
        axes[0].legend(fontsize=7)
        return figure

    def notes(self, rows: Sequence[OverheadRow]) -> list[str]:
        """What S3Agg-LW had to reach."""
        return [
            f"{row.request}: {AGG}, G={row.chunk_tokens}: {row.over_ms:+.1f} ms, "
            f"{row.over_percent:+.2f} % (goal {goal(row)})"
            for row in rows
            if row.path == AGG and row.chunk_tokens == GOAL_CHUNK_TOKENS
        ]


def goal(row: OverheadRow) -> str:
    """Of S3Agg-LW at 64 tokens a chunk."""
    if row.request.startswith("4K"):
        return f"at most +{GOAL_SHORT_MS:g} ms"
    return f"at most +{100 * GOAL_LONG:g} %"


def requests_of(context: Context) -> Iterator[ScaledRequest]:
    """The figure's requests at each chunk size."""
    papers = QUICK_REQUESTS if context.is_quick else FIGURE_REQUESTS
    for paper in papers:
        for chunk_tokens in QUICK_CHUNK_TOKENS if context.is_quick else CHUNK_TOKENS:
            layers = QUICK_LAYERS if context.is_quick and is_long(paper) else NUM_LAYERS
            yield ScaledRequest(paper, context.scale, chunk_tokens, layers)


def is_long(paper: PaperRequest) -> bool:
    """Whether one prefill takes seconds."""
    return paper.context_tokens > SHORT_TOKENS


def _repeats(context: Context, paper: PaperRequest) -> int:
    if context.is_quick:
        return REPEATS_QUICK
    return REPEATS_LONG if is_long(paper) else REPEATS_SHORT


def _measure(store: Served, request: ScaledRequest, repeats: int) -> list[OverheadRow]:
    """All paths in turn, so that a slow spell of the machine hits each of them."""
    store.load(request)
    gpu, whole_gpu = store.gpu(request), store.gpu(request, whole=True)
    layers, chunks = LocalLayers(request), LocalChunks(request)
    ways: dict[str, Callable[[], Prefill]] = {
        OPTIMAL: lambda: layers.prefill(gpu),
        LOCAL_CHUNKWISE: lambda: chunks.prefill_whole(whole_gpu),
        LOCAL_LAYERWISE: lambda: chunks.prefill(gpu),
        BATCH: lambda: store.prefill_whole(request, whole_gpu).prefill,
        AGG: lambda: store.prefill(request, gpu).prefill,
    }
    samples: dict[str, list[Prefill]] = {path: [] for path in ways}
    for _ in range(repeats):
        for path, prefill in ways.items():
            samples[path].append(prefill())
    return overhead_rows(request, samples)


def overhead_rows(request: ScaledRequest, samples: dict[str, list[Prefill]]) -> list[OverheadRow]:
    """A row for each path, `opt-local-LW` among them."""
    optimal_s = statistics.median(one.ttft_s for one in samples[OPTIMAL])
    return [_row(request, path, of_path, optimal_s) for path, of_path in samples.items()]


def _row(
    request: ScaledRequest, path: str, samples: list[Prefill], optimal_s: float
) -> OverheadRow:
    ttft_s = statistics.median(one.ttft_s for one in samples)
    return OverheadRow(
        request=request.paper.name,
        chunk_tokens=request.chunk_tokens,
        path=path,
        samples=len(samples),
        ttft_ms=1000 * ttft_s,
        over_ms=1000 * (ttft_s - optimal_s),
        over_percent=100 * (ttft_s / optimal_s - 1),
        first_layer_ms=1000 * statistics.median(one.loaded_s[0] for one in samples),
        compute_ms=1000 * request.num_layers * request.paper.window_s,
        payload_mib=request.geometry.payload_bytes / 2**20,
    )
