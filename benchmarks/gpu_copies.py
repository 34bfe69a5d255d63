"""`python -m benchmarks.gpu_copies`: copies between host memory and a GPU, beside what it computes.

Runs unattended on a machine with torch and CUDA, in about two minutes; needs no server. Rates are
shown beside one `cudaMemcpyAsync` of the same bytes out of the same memory, measured by turns in
the same run. `--emulated` runs part of it without a GPU, on a little memory, to see that it works:
its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from objectcache.connectors.vllm.worker.paged_layout import ContentShape, PagedLayer
from objectcache.deliveries.delivery import Delivery
from objectcache.deliveries.layer_progress import LayerProgress
from objectcache.gpu import copy_kernel
from objectcache.gpu.copier import Copier
from objectcache.gpu.cuda_device import CudaDevice
from objectcache.gpu.device import Device, Direction, Way
from objectcache.gpu.line import LineSettings
from objectcache.gpu.pieces import BlockPart, PagedBlocks, Pieces
from objectcache.landing.memory_file import MemoryFile
from objectcache.payload import Bytes, PayloadShape
from objectcache_schemas.descriptor import DeliveryMode
from objectcache_schemas.limits import GIB, MIB
from tests.emulated_device import EmulatedDevice

LAYERS = 32
ROUNDS = 5
HELD_S = 2.0  # after which what waits is let go
KIB = 1024
KERNEL_BLOCKS = copy_kernel.BLOCKS
SCATTERED = (Way.EACH, Way.BATCH, Way.STAGED, Way.MAPPED)  # that do not ask for an order of blocks


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: its samples' median, and its ratio to what it stands beside."""

    group: str
    name: str
    median: float
    unit: str
    ratio: float | None = None
    ratio_of: str = ""


class Bench:
    """A device, page-locked memory of one payload, and the device's blocks for it."""

    def __init__(self, device: Device, layer_bytes: int) -> None:
        self.device = device
        self.layer_bytes = layer_bytes
        self.rows: list[Row] = []
        self.file = MemoryFile(LAYERS * layer_bytes)
        self.host = self.file.array()
        fill = np.random.default_rng(1).integers(0, 256, layer_bytes, np.uint8)
        for layer in range(LAYERS):
            self.host[layer * layer_bytes :][:layer_bytes] = fill
        self.blocks = device.allocate(LAYERS * layer_bytes)

    @property
    def all_bytes(self) -> int:
        return LAYERS * self.layer_bytes

    def note(self, *columns: Any) -> None:
        row = Row(*columns)
        self.rows.append(row)
        ratio = "" if row.ratio is None else f"{row.ratio:6.3f} of {row.ratio_of}"
        print(f"{row.group:24} {row.name:56} {row.median:9.3f} {row.unit:5} {ratio}", flush=True)

    @contextmanager
    def copier(self, way: Way, task_bytes: int = 4 * MIB, depth: int = 4) -> Iterator[Copier]:
        settings = LineSettings(way, task_bytes, depth)
        copier = Copier(self.device, loads=settings, saves=settings)
        copier.page_locked.lock_pages(self.file)
        try:
            yield copier
        finally:
            copier.close()

    def layer_blocks(self, layer: int, slice_bytes: int) -> PagedBlocks:
        """K and V apart, as `[2, blocks, tokens, heads, dim]`."""
        count = self.layer_bytes // slice_bytes
        half = slice_bytes // 2
        base = self.blocks + layer * self.layer_bytes
        parts = [BlockPart(base + part * count * half, half, half) for part in (0, 1)]
        return PagedBlocks(parts, count)

    def delivery(self, slice_bytes: int, ready_layers: int = LAYERS) -> Delivery:
        chunks = self.layer_bytes // slice_bytes
        shape = PayloadShape(0, LAYERS, chunks, slice_bytes, DeliveryMode.LAYERWISE)
        progress = LayerProgress(0, LAYERS)
        progress.advance(ready_layers)
        return Delivery(progress, shape, self.host, None, transport="shared_memory")


def gb_per_s(count_bytes: int, seconds: float) -> float:
    return count_bytes / seconds / 1e9


def by_turns(
    first: Callable[[], float], others: Sequence[Callable[[], float]], rounds: int = ROUNDS
) -> tuple[list[float], list[list[float]]]:
    """Seconds of each, after a round that does not count."""
    for each in (first, *others):
        each()
    samples: tuple[list[float], list[list[float]]] = ([], [[] for _ in others])
    for _ in range(rounds):
        samples[0].append(first())
        for own, other in zip(samples[1], others, strict=True):
            own.append(other())
    return samples


def timed(call: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    call()
    return time.perf_counter() - begin_s


def one_copy(bench: Bench, copier: Copier, direction: Direction) -> Callable[[], float]:
    """Everything by one call."""
    pieces = Pieces.of([(bench.host.ctypes.data, bench.blocks, bench.all_bytes)])
    lane = copier.device.lane(bench.all_bytes, 1)

    def copy() -> None:
        lane.copy(pieces, direction, Way.EACH)
        lane.wait_idle()

    return lambda: timed(copy)


def one_load(bench: Bench, copier: Copier, slice_bytes: int, ids: Any) -> float:
    places = {layer: bench.layer_blocks(layer, slice_bytes) for layer in range(LAYERS)}
    delivery = bench.delivery(slice_bytes)

    def load() -> None:
        with copier.load(delivery, lambda layer, s: places[layer].pieces(ids, s)) as load:
            load.finish()

    return timed(load)


def one_save(bench: Bench, copier: Copier, slice_bytes: int, ids: Any) -> float:
    payload = bench.host.reshape(LAYERS, -1, slice_bytes)

    def save() -> None:
        saves = [
            copier.save(bench.layer_blocks(layer, slice_bytes).pieces(ids, payload[layer]))
            for layer in range(LAYERS)
        ]
        for each in saves:
            each.wait()

    return timed(save)


def measure_micro_tasks(bench: Bench) -> None:
    """Payloads whose blocks follow each other, in micro-tasks."""
    whole = [*range(1)]
    for task_bytes, depth in ((1, 8), (2, 8), (4, 1), (4, 4), (4, 8), (4, 16), (8, 8), (16, 4)):
        with bench.copier(Way.EACH, task_bytes * MIB, depth) as copier:
            single = one_copy(bench, copier, Direction.LOAD)

            def load(copier: Copier = copier) -> float:
                delivery = bench.delivery(bench.layer_bytes)

                def places(layer: int, slices: Bytes) -> Pieces:
                    place = bench.blocks + layer * bench.layer_bytes
                    part = BlockPart(place, bench.layer_bytes, bench.layer_bytes)
                    return PagedBlocks([part], 1).pieces(whole, slices)

                def run() -> None:
                    with copier.load(delivery, places) as load:
                        load.finish()

                return timed(run)

            one, (tasks,) = by_turns(single, [load])
            ratios = [a / b for a, b in zip(one, tasks, strict=True)]
            bench.note(
                "micro-tasks, load",
                f"{task_bytes} MiB, {depth} at once",
                gb_per_s(bench.all_bytes, statistics.median(tasks)),
                "GB/s",
                statistics.median(ratios),
                "one cudaMemcpyAsync",
            )


@dataclass(frozen=True, slots=True)
class Scatter:
    """One way of copying pieces of one size."""

    way: Way
    piece_kib: int
    task_mib: int = 4
    in_order: bool = False
    kernel_blocks: int = KERNEL_BLOCKS

    @property
    def name(self) -> str:
        order = ", blocks in order" if self.in_order else ""
        blocks = f", {self.kernel_blocks} thread blocks" if self.way.takes_kernels else ""
        return (
            f"{self.way.value}, {self.piece_kib} KiB, tasks of {self.task_mib} MiB{order}{blocks}"
        )


SCATTERS = [
    *(Scatter(Way.EACH, piece_kib) for piece_kib in (8, 32, 128)),
    *(Scatter(Way.BATCH, piece_kib) for piece_kib in (8, 32, 128)),
    Scatter(Way.BATCH, 32, 16),
    *(Scatter(way, 32, mib) for way in (Way.STAGED, Way.MAPPED) for mib in (4, 16, 32)),
    *(Scatter(way, kib, 16) for way in (Way.STAGED, Way.MAPPED) for kib in (8, 128)),
    Scatter(Way.MAPPED, 32, 16, kernel_blocks=48),
    Scatter(Way.ROWS, 8, in_order=True),
    Scatter(Way.ROWS, 32, in_order=True),
    Scatter(Way.BATCH, 32, in_order=True),
]


def measure_scattered(bench: Bench, scatters: Sequence[Scatter]) -> None:
    """Pieces of one size into blocks and out of them, in both directions."""
    directions: list[tuple[Direction, Callable[..., float]]] = [
        (Direction.LOAD, one_load),
        (Direction.SAVE, one_save),
    ]
    for scatter in scatters:
        if scatter.way not in bench.device.ways:
            continue
        copy_kernel.BLOCKS = scatter.kernel_blocks
        slice_bytes = 2 * scatter.piece_kib * KIB
        count = bench.layer_bytes // slice_bytes
        chosen = np.arange(count)
        ids = chosen if scatter.in_order else np.random.default_rng(2).permutation(chosen)
        with bench.copier(scatter.way, scatter.task_mib * MIB) as copier:
            for direction, copies in directions:
                single = one_copy(bench, copier, direction)
                run = partial(copies, bench, copier, slice_bytes, ids)
                one, (tasks,) = by_turns(single, [run], 3)
                cpu_s = time.process_time()
                run()
                cpu_s = time.process_time() - cpu_s
                ratios = [a / b for a, b in zip(one, tasks, strict=True)]
                bench.note(
                    f"scattered, {direction.value}",
                    scatter.name,
                    gb_per_s(bench.all_bytes, statistics.median(tasks)),
                    "GB/s",
                    statistics.median(ratios),
                    f"one cudaMemcpyAsync; {cpu_s / bench.all_bytes * GIB * 1e3:.0f} CPU ms a GiB",
                )
    copy_kernel.BLOCKS = KERNEL_BLOCKS


def measure_both_at_once(bench: Bench) -> None:
    """A load while saves go on, beside the load alone. Both are of the same memory: only rates."""
    slice_bytes = 64 * KIB
    ids = list(range(bench.layer_bytes // slice_bytes))
    with bench.copier(Way.STAGED, 16 * MIB, 4) as copier:
        alone = [one_load(bench, copier, slice_bytes, ids) for _ in range(4)][1:]
        with copying(bench, copier, one_save, slice_bytes, ids) as rate:
            beside = [one_load(bench, copier, slice_bytes, ids) for _ in range(4)][1:]
    ratio = statistics.median(alone) / statistics.median(beside)
    loaded = gb_per_s(bench.all_bytes, statistics.median(beside))
    bench.note("both directions at once", "load", loaded, "GB/s", ratio, "the load alone")
    bench.note("both directions at once", "save", rate[0], "GB/s")


# --- with torch ---


def measure_link(bench: Bench, torch: Any) -> None:
    """One copy of a payload out of each kind of memory."""
    count = bench.all_bytes
    on_device = torch.empty(count, dtype=torch.uint8, device="cuda")
    pageable = torch.from_numpy(np.empty(count, np.uint8).copy())
    pageable.fill_(1)
    pinned = torch.empty(count, dtype=torch.uint8, pin_memory=True)
    with bench.copier(Way.EACH) as copier:
        registered = one_copy(bench, copier, Direction.LOAD)
        saved = one_copy(bench, copier, Direction.SAVE)

        def of(target: Any, source: Any) -> Callable[[], float]:
            def copy() -> None:
                target.copy_(source, non_blocking=True)
                torch.cuda.synchronize()

            return lambda: timed(copy)

        kinds = {
            "load, torch's page-locked memory": of(on_device, pinned),
            "load, pageable memory": of(on_device, pageable),
            "load, a registered memory file": registered,
            "save, torch's page-locked memory": of(pinned, on_device),
            "save, pageable memory": of(pageable, on_device),
            "save, a registered memory file": saved,
        }
        names = list(kinds)
        first, others = by_turns(kinds[names[0]], [kinds[name] for name in names[1:]])
        for name, samples in zip(names, [first, *others], strict=True):
            reference = first if name.startswith("load") else others[2]
            bench.note(
                "one copy of everything",
                name,
                gb_per_s(count, statistics.median(samples)),
                "GB/s",
                statistics.median(reference) / statistics.median(samples),
                "torch's page-locked memory",
            )
    begin_s = time.perf_counter()
    file = MemoryFile(count)
    made_s = time.perf_counter() - begin_s
    took_s = timed(lambda: bench.device.lock_pages(file.array().ctypes.data, count))
    bench.device.unlock_pages(file.array().ctypes.data)
    bench.note("registering memory", f"{count / GIB:g} GiB", took_s * 1e3, "ms")
    bench.note("making a memory file", f"{count / GIB:g} GiB", made_s * 1e3, "ms")


class Step:
    """A forward of matrix products, a few milliseconds long, on the current stream."""

    def __init__(self, torch: Any, products: int = 1, size: int = 6144) -> None:
        self._torch = torch
        self._products = products
        shape = (size, size)
        self._a = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        self._b = torch.randn(shape, device="cuda", dtype=torch.bfloat16) / size**0.5

    def layer(self) -> None:
        for _ in range(self._products):
            self._a = self._a @ self._b

    def run(self) -> float:
        """Seconds on the device, from the first layer on."""
        begin, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(LAYERS):
            self.layer()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def measure_beside_a_step(bench: Bench, torch: Any) -> None:
    """Loads without a pause beside a step: what they slow it down, and what they reach."""
    step = Step(torch)
    slice_bytes = 64 * KIB
    count = bench.layer_bytes // slice_bytes
    ids = np.random.default_rng(2).permutation(count)
    for _ in range(3):
        step.run()
    for way in SCATTERED:
        for direction, copies in ((Direction.LOAD, one_load), (Direction.SAVE, one_save)):
            with bench.copier(way, 16 * MIB) as copier:
                alone, beside, rates = [], [], []
                for _ in range(4):
                    alone.append(statistics.median(step.run() for _ in range(4)))
                    with copying(bench, copier, copies, slice_bytes, ids) as rate:
                        beside.append(statistics.median(step.run() for _ in range(4)))
                    rates.append(rate[0])
                slower = statistics.median(b / a for a, b in zip(alone, beside, strict=True))
                name = f"{direction.value}, {way.value}, pieces of 32 KiB"
                milliseconds = statistics.median(beside) * 1e3
                bench.note("step beside copies", name, milliseconds, "ms", slower, "alone")
                bench.note("  their rate", name, statistics.median(rates), "GB/s")
    copier_free = [step.run() for _ in range(5)]
    with todays(bench, torch, ids.tolist()) as rate:
        beside = [step.run() for _ in range(8)]
    ratio = statistics.median(beside) / statistics.median(copier_free)
    name = "load, torch's pageable copy and index_copy_"
    bench.note("step beside copies", name, statistics.median(beside) * 1e3, "ms", ratio, "alone")
    bench.note("  their rate", name, rate[0], "GB/s")


@contextmanager
def copying(
    bench: Bench, copier: Copier, copies: Callable[..., float], slice_bytes: int, ids: Any
) -> Iterator[list[float]]:
    """Copies go on in another thread until the block ends; gives their rate afterwards."""
    yield from _repeated(lambda: copies(bench, copier, slice_bytes, ids), bench.all_bytes)


@contextmanager
def todays(bench: Bench, torch: Any, ids: list[int]) -> Iterator[list[float]]:
    """What SGLang's linker does here: one pageable copy a layer, then `index_copy_`."""
    stream = torch.cuda.Stream()
    pages = torch.tensor(ids, device="cuda")
    layer = torch.empty((2, len(ids), bench.layer_bytes // len(ids) // 2), dtype=torch.uint8)
    parts = layer.to("cuda")
    payload = bench.host.reshape(LAYERS, len(ids), -1).copy()

    def load() -> None:
        with torch.cuda.stream(stream):
            for index in range(LAYERS):
                source = torch.from_numpy(payload[index]).to("cuda", non_blocking=True)
                halves = source.view(len(ids), 2, -1)
                for half in range(2):
                    parts[half].index_copy_(0, pages, halves[:, half])
        stream.synchronize()

    yield from _repeated(load, bench.all_bytes)


def _repeated(copy: Callable[[], object], count_bytes: int) -> Iterator[list[float]]:
    ends, begun = threading.Event(), threading.Event()
    rate: list[float] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            copy()
            begun.set()
            begin_s, rounds = time.perf_counter(), 0
            while not ends.is_set() or not rounds:
                copy()
                rounds += 1
            rate.append(gb_per_s(rounds * count_bytes, time.perf_counter() - begin_s))
        except BaseException as error:
            failures.append(error)
        finally:
            begun.set()

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    try:
        yield rate
    finally:
        ends.set()
        thread.join()
        if failures:
            raise failures[0]


def measure_held_streams(bench: Bench, torch: Any) -> None:
    """A step beside other streams that are held: no multiprocessor waits, but streams share
    the device's queues. A step that stood still until the holds were raised is said so.
    """
    step = Step(torch)
    for _ in range(3):
        step.run()
    alone = statistics.median(step.run() for _ in range(6))
    for count in (1, 2, 4, 8):
        holds = [bench.device.stream_hold() for _ in range(count)]
        for hold in holds:
            hold.hold(torch.cuda.Stream().cuda_stream, 1)
        frees = [threading.Timer(HELD_S, hold.raise_now, (1,)) for hold in holds]
        for timer in frees:
            timer.start()
        held = [step.run() for _ in range(6)]
        stood_still = not any(timer.is_alive() for timer in frees)
        for timer, hold in zip(frees, holds, strict=True):
            timer.cancel()
            hold.raise_now(1)
        torch.cuda.synchronize()
        for hold in holds:
            hold.close()
        name = f"{count} streams held" + " STOOD STILL" * stood_still
        milliseconds = statistics.median(held) * 1e3
        bench.note(
            "step beside waits", name, milliseconds, "ms", milliseconds / alone / 1e3, "alone"
        )


def measure_waiting(bench: Bench, torch: Any, name: str, ways: Sequence[Way]) -> None:
    """A step whose layers arrive while it runs: what a whole layerwise load takes beside what
    bounds it.
    """
    step = Step(torch)
    stream = torch.cuda.current_stream().cuda_stream
    for _ in range(3):
        step.run()
    alone = [step.run() for _ in range(6)]
    slice_bytes = 64 * KIB
    count = bench.layer_bytes // slice_bytes
    ids = np.random.default_rng(2).permutation(count)
    places = [bench.layer_blocks(layer, slice_bytes) for layer in range(LAYERS)]
    for way in ways:
        took_s: list[float] = []
        queued_s: list[float] = []
        with bench.copier(way, 16 * MIB) as copier:
            for _ in range(ROUNDS):
                delivery = bench.delivery(slice_bytes, 0)
                arrives = threading.Thread(target=_arrive, args=(delivery.progress,))
                torch.cuda.synchronize()
                with copier.load(
                    delivery, lambda layer, s: places[layer].pieces(ids, s), stream
                ) as load:
                    arrives.start()
                    begin_s = time.perf_counter()
                    for layer in range(LAYERS):
                        (load.wait if name == "wait" else load.hold)(layer, stream)
                        step.layer()
                    queued_s.append(time.perf_counter() - begin_s)
                    torch.cuda.synchronize()
                    took_s.append(time.perf_counter() - begin_s)
                    load.finish()
                arrives.join()
        ratio = statistics.median(took_s) / statistics.median(alone)
        milliseconds = statistics.median(took_s) * 1e3
        note = f"the step alone; its thread {statistics.median(queued_s) * 1e3:.1f} ms"
        title = "layerwise load and step"
        bench.note(title, f"{way.value}, by {name}", milliseconds, "ms", ratio, note)


def _arrive(progress: LayerProgress) -> None:
    for layer in range(LAYERS):
        time.sleep(0.0005)
        progress.advance(layer + 1)


def measure_vllm_shaped(bench: Bench, torch: Any) -> None:
    """The blocks of a whole load: today's copy in vLLM's connector, and the copier."""
    heads, width, tokens = 8, 128, 16
    slice_bytes = 2 * tokens * heads * width * 2
    count = bench.layer_bytes // slice_bytes
    caches = [
        torch.zeros((2, count, tokens, heads, width), dtype=torch.bfloat16, device="cuda")
        for _ in range(LAYERS)
    ]
    content = ContentShape(width, width)
    paged = [PagedLayer(cache, count, content) for cache in caches]
    payload = bench.host.reshape(LAYERS, count, slice_bytes)
    half = slice_bytes // 2
    blocks = []
    for cache in caches:
        base = cache.data_ptr()
        parts = [BlockPart(base + part * count * half, half, half) for part in (0, 1)]
        blocks.append(PagedBlocks(parts, count))
    plain = payload.copy()
    kinds = {
        "blocks at random": np.random.default_rng(2).permutation(count).tolist(),
        "blocks in order": list(range(count)),
    }
    for kind, ids in kinds.items():

        def today(ids: list[int] = ids) -> float:
            def copy() -> None:
                for layer in range(LAYERS):
                    paged[layer].load(ids, plain[layer])
                torch.cuda.synchronize()

            return timed(copy)

        with bench.copier(Way.STAGED, 16 * MIB) as copier:
            chosen = np.array(ids)

            def ours(ids: Any = chosen, copier: Copier = copier) -> float:
                delivery = bench.delivery(slice_bytes)

                def load() -> None:
                    with copier.load(delivery, lambda n, s: blocks[n].pieces(ids, s)) as load:
                        load.finish()

                return timed(load)

            before, (after,) = by_turns(today, [ours], 2)
            for load in (today, ours):
                for cache in caches:
                    cache.zero_()
                load()
                for layer in (0, LAYERS - 1):
                    seen = caches[layer].view(torch.uint8).cpu().numpy()
                    seen = seen.reshape(2, count, half)[:, ids].transpose(1, 0, 2)
                    assert np.array_equal(seen.reshape(count, -1), payload[layer]), load
        size = f"{bench.all_bytes / GIB:g} GiB, {kind}"
        base_s = statistics.median(before)
        for name, samples in (("today's PagedLayer.load", before), ("copier, staged", after)):
            bench.note(
                "vLLM-shaped load",
                f"{name}, {size}",
                statistics.median(samples) * 1e3,
                "ms",
                base_s / statistics.median(samples),
                "today's, times faster",
            )


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; 0 whatever the figures are."""
    parser = argparse.ArgumentParser("python -m benchmarks.gpu_copies", description=__doc__)
    parser.add_argument("--emulated", action="store_true", help="without a GPU, to try it out")
    parser.add_argument("--quick", action="store_true", help="a quarter of the memory")
    parser.add_argument("--only", action="append", help="one of the groups; may be repeated")
    parser.add_argument("--results", type=Path, help="a JSON file for the rows")
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    device: Device = EmulatedDevice() if options.emulated else CudaDevice()
    layer_bytes = 2 * MIB if options.emulated else (8 if options.quick else 32) * MIB
    bench = Bench(device, layer_bytes)
    groups: dict[str, Callable[[], None]] = {
        "micro-tasks": lambda: measure_micro_tasks(bench),
        "both": lambda: measure_both_at_once(bench),
        "scattered": lambda: measure_scattered(bench, SCATTERS),
    }
    if not options.emulated:
        import torch

        print(torch.cuda.get_device_name(), "torch", torch.__version__, repr(device))
        groups = {
            "link": lambda: measure_link(bench, torch),
            **groups,
            "vllm": lambda: measure_vllm_shaped(bench, torch),
            "waiting": lambda: measure_waiting(bench, torch, "wait", SCATTERED),
            "beside": lambda: measure_beside_a_step(bench, torch),
            "held": lambda: measure_held_streams(bench, torch),
            "holding": lambda: measure_waiting(bench, torch, "hold", [Way.EACH, Way.BATCH]),
        }
    for name, group in groups.items():
        if not options.only or name in options.only:
            begin_s = time.perf_counter()
            group()
            print(f"# {name} took {time.perf_counter() - begin_s:.1f} s", flush=True)
            if options.results:
                rows = [asdict(row) for row in bench.rows]
                options.results.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
