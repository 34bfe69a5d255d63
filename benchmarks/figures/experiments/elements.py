"""Table A7: into how many elements a prefix falls, before and after aggregation.

By the server's own planner, for the paper's prefixes at their full sizes: nothing is stored or
moved. An element is what the server reads and writes as one piece; a delivery tells its client of
whole layers, whatever the pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from benchmarks.basis.prefix import Geometry
from benchmarks.figures.experiment import Context, Experiment
from benchmarks.figures.paper_data import NUM_LAYERS, PAPER_ELEMENTS, REQUESTS, PaperRequest
from benchmarks.figures.plots import grouped_bars, panels
from objectcache_runtime.settings import StorageSettings
from objectcache_schemas.descriptor import DeliveryMode, Descriptor
from objectcache_schemas.limits import MIB
from objectcache_storage_server.deliveries.plan import plan_chunks, target_fragment_bytes
from objectcache_storage_server.engines.base import Placement
from objectcache_storage_server.engines.local.space.extent_geometry import split_into_extents

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONTEXTS = ("4K, 87.5%", "64K, 87.5%")
CHUNK_TOKENS = (16, 64, 256)
READER_THREADS = 2  # which the size of a piece depends on


@dataclass(frozen=True, slots=True)
class ElementsRow:
    """One prefix in chunks of one size."""

    request: str
    chunk_tokens: int
    chunk_count: int
    original_elements: int  # a slice of every chunk for every layer
    elements: int  # fragments of the delivery into a target
    element_mib: float  # of most of them
    reduction: float
    reads: int  # of the data files, for all fragments, where one put stored the prefix
    told_layers: int
    paper_elements: int
    paper_reduction: float


class ElementsExperiment(Experiment[ElementsRow]):
    """Table A7."""

    name: ClassVar[str] = "elements"
    title: ClassVar[str] = "Table A7: elements of a delivery, before and after aggregation"
    conditions: ClassVar[str] = (
        "Nothing is scaled, and no byte is moved: these are plans, with default settings and "
        f"{READER_THREADS} reader threads."
    )

    def run(self, context: Context) -> list[ElementsRow]:
        return list(elements_rows())

    def plot(self, rows: Sequence[ElementsRow]) -> Figure:
        figure, axes = panels(1, len(CONTEXTS))
        for panel, request in zip(axes, CONTEXTS, strict=True):
            mine = [row for row in rows if row.request == request]
            bars: dict[str, Sequence[float | None]] = {
                "slices": [float(row.original_elements) for row in mine],
                "ours": [float(row.elements) for row in mine],
                "the paper's": [float(row.paper_elements) for row in mine],
            }
            grouped_bars(panel, [f"G={row.chunk_tokens}" for row in mine], bars)
            panel.set_yscale("log")
            panel.set_title(request)
            panel.set_ylabel("elements")
        axes[0].legend(loc="upper left", fontsize=7)
        return figure


def elements_rows() -> Iterator[ElementsRow]:
    """All rows, in the table's order."""
    for name in CONTEXTS:
        for chunk_tokens in CHUNK_TOKENS:
            yield _row(REQUESTS[name], chunk_tokens)


def _row(request: PaperRequest, chunk_tokens: int) -> ElementsRow:
    geometry = Geometry(chunk_tokens, request.cached_tokens // chunk_tokens)
    settings = StorageSettings()
    fragment_bytes = target_fragment_bytes(
        geometry.payload_bytes // NUM_LAYERS,
        READER_THREADS,
        settings.fragment_bytes,
        settings.target_fragment_bytes_max,
    )
    keys = tuple(str(number) for number in range(geometry.chunk_count))
    layerwise = DeliveryMode.LAYERWISE
    descriptor = Descriptor(
        keys, geometry.num_layers, chunk_tokens, geometry.slice_bytes, layerwise
    )
    plan = plan_chunks(descriptor, placements(geometry, settings), layerwise, fragment_bytes)
    fragments = list(plan.fragments())
    slices = geometry.chunk_count * geometry.num_layers
    paper_elements = PAPER_ELEMENTS[request.name][CHUNK_TOKENS.index(chunk_tokens)]
    return ElementsRow(
        request=request.name,
        chunk_tokens=chunk_tokens,
        chunk_count=geometry.chunk_count,
        original_elements=slices,
        elements=len(fragments),
        element_mib=max(fragment.length_bytes for fragment in fragments) / MIB,
        reduction=slices / len(fragments),
        reads=sum(len(plan.reads(fragment)) for fragment in fragments),
        told_layers=geometry.num_layers,
        paper_elements=paper_elements,
        paper_reduction=slices / paper_elements,
    )


def placements(geometry: Geometry, settings: StorageSettings) -> list[Placement]:
    """Where one put lays the chunks: extent after extent."""
    found: list[Placement] = []
    base_bytes = 0
    for extent in split_into_extents(
        geometry.chunk_count,
        geometry.num_layers,
        geometry.slice_bytes,
        settings.extent_row_bytes,
        settings.extent_bytes_max,
    ):
        found += [
            Placement(
                0,
                base_bytes + extent.slice_offset_bytes(slot, 0),
                geometry.slice_bytes,
                extent.row_stride_bytes,
            )
            for slot in range(extent.slots)
        ]
        base_bytes += extent.extent_bytes
    return found
