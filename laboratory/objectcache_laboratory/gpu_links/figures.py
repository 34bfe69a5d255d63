"""MMA's figures, by the paper's policy and ours on the machine in virtual time.

Rates are known, from a copy of 1 GB before. Ours uses as few of the links as are as good as all
(`enough_links`), of which calibration copies the same. `paper` is as it is read there, None where
the paper has no number.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import mean

from objectcache.gpu.links.enough_links import enough_links
from objectcache.gpu.links.link_rates import LinkRates
from objectcache.gpu.links.pull_settings import OURS, PAPERS, PullSettings
from objectcache_laboratory.gpu_links.machine import GB, Carried, Copying, LinkedGpus, carry

MB = 1_000_000
MACHINE = LinkedGpus()
CALIBRATION_BYTES = 1000 * MB
PAPER_GAIN = 4.62  # section 5.1.1, of 245 GB/s over 53
PAPER_PEER_GBPS = 367.6  # table 2, nothing else copied
PAPER_WITHOUT_DIRECT_FIRST_GBPS = 330.56
LONG_PREFIX_BYTES = 17_500 * MB  # section 5.2.1, Qwen-7B-Chat with 64K tokens
LONG_PREFIX_SHARE = 0.74  # of its TTFT that is transfer, by the paper's two claims together
TASKS_BYTES = 512 * MB  # of each copy where figures 11 and 13 do not say otherwise
SEEDS = 20  # of the order in which links take, where that decides
# Four links leave less than 212 of the paper's 245 GB/s, for a micro-task's own time; so much
# between the nodes and it is 245 again.
FITTED_BYTES_PER_S = 49 * GB
NIC_BYTES_PER_S = 50 * GB  # 400 Gb/s
SLOW_NIC_BYTES_PER_S = 12.5 * GB
LAYERS = 32


@dataclass(frozen=True, slots=True)
class LinksRow:
    """One number of a figure."""

    figure: str
    what: str
    unit: str
    paper: str | None
    papers_policy: float
    ours: float


@functools.cache
def kept_links(machine: LinkedGpus, *, by_finish_time: bool) -> tuple[int, ...]:
    """The links that are used: by the paper's policy all."""
    if not by_finish_time:
        return tuple(range(machine.gpus))
    counts = range(1, machine.gpus + 1)
    rates = [_calibrated_bytes_per_s(replace(machine, gpus=count)) for count in counts]
    return tuple(range(enough_links(rates)))


@functools.cache
def _calibrated_bytes_per_s(machine: LinkedGpus) -> float:
    return carry(machine, OURS, [Copying(CALIBRATION_BYTES)]).bytes_per_s


@functools.cache
def known_rates(machine: LinkedGpus, settings: PullSettings) -> dict[tuple[int, int], float]:
    """What a copy of 1 GB over the links that are used has taught."""
    rates = LinkRates(machine.link_bytes_per_s)
    links = kept_links(machine, by_finish_time=settings.by_finish_time)
    carry(machine, settings, [Copying(CALIBRATION_BYTES, links=links)], rates)
    return rates.known


def copied(machine: LinkedGpus, settings: PullSettings, *copyings: Copying) -> Carried:
    """With known rates."""
    rates = LinkRates(machine.link_bytes_per_s, known_rates(machine, settings))
    return carry(machine, settings, copyings, rates)


def copied_at_once(machine: LinkedGpus, settings: PullSettings, size_bytes: int) -> Carried:
    """One copy to GPU 0, over the links that are used."""
    links = kept_links(machine, by_finish_time=settings.by_finish_time)
    return copied(machine, settings, Copying(size_bytes, links=links))


def bandwidth_gbytes_per_s(
    size_bytes: int, settings: PullSettings, machine: LinkedGpus = MACHINE
) -> float:
    """Figures 8, 9 and 13: of one copy to GPU 0."""
    return copied_at_once(machine, settings, size_bytes).bytes_per_s / GB


def over_links_gbytes_per_s(
    size_bytes: int, settings: PullSettings, count: int, slow_share: float = 1.0
) -> float:
    """Not in the paper: one copy to GPU 0 over the first so many links of its machine, of the last
    of which others leave such a share. What finish time gains by itself, with the same links.
    """
    slow = ((count - 1, slow_share),) if slow_share < 1 else ()
    machine = replace(MACHINE, left_by_others=slow)
    links = tuple(range(count))
    rates = LinkRates(machine.link_bytes_per_s)
    carry(machine, settings, [Copying(CALIBRATION_BYTES, links=links)], rates)
    return carry(machine, settings, [Copying(size_bytes, links=links)], rates).bytes_per_s / GB


def layers_gbytes_per_s(layer_bytes: int, at_once: int, settings: PullSettings) -> float:
    """Of 32 layers, so many of which are on links or wait for them, over the links that are used.

    Not in the paper, which knows no layers.
    """
    links = kept_links(MACHINE, by_finish_time=settings.by_finish_time)
    layers = [Copying(layer_bytes, due=layer, links=links) for layer in range(LAYERS)]
    rates = LinkRates(MACHINE.link_bytes_per_s, known_rates(MACHINE, settings))
    return carry(MACHINE, settings, layers, rates, at_once=at_once).bytes_per_s / GB


def break_even_mb(settings: PullSettings, machine: LinkedGpus = MACHINE) -> float:
    """Figure 14: from how many MB on a copy over all links is sooner there than a native one."""
    always = replace(settings, fallback_bytes=0)
    for tenths in range(50, 400):
        size = tenths * MB // 10
        if copied_at_once(machine, always, size).last_s < machine.native_s(size):
            return tenths / 10
    raise AssertionError("no size pays")


def two_links_ms(settings: PullSettings, split: tuple[int, int] | None, left: float = 1.0) -> float:
    """Figure 11: 512 MB over two links, shared out by the policy or as `split` says, where others
    leave so much of the first.
    """
    machine = LinkedGpus(gpus=2, left_by_others=() if left == 1.0 else ((0, left),))
    if split is None:
        return 1000 * copied_at_once(machine, settings, TASKS_BYTES).last_s
    parts = [TASKS_BYTES * part // sum(split) for part in split]
    fixed = [Copying(part, links=(link,)) for link, part in enumerate(parts)]
    return 1000 * copied(machine, settings, *fixed).last_s


@functools.cache
def eight_at_once(settings: PullSettings, seed: int) -> Carried:
    """Table 2: eight copies at once, one to each GPU from memory of its node, over the links of the
    node. Over all eight the paper's 330.6 GB/s could not be: what is between the nodes would be
    full long before.
    """
    node_of = [gpu // MACHINE.gpus_of_node for gpu in range(MACHINE.gpus)]
    copyings = [
        Copying(TASKS_BYTES, gpu, node, links=MACHINE.node_links(node))
        for gpu, node in enumerate(node_of)
    ]
    return carry(MACHINE, settings, copyings, seed=seed)


def relayed_share(settings: PullSettings, *, direct_first: bool) -> float:
    """Table 2: of all bytes, the mean of `SEEDS`: a link that has taken once what is another's
    mostly goes on so.
    """
    settings = replace(settings, direct_first=direct_first)
    return mean(eight_at_once(settings, seed).relayed_share for seed in range(SEEDS))


def peer_gbytes_per_s(settings: PullSettings, *, direct_first: bool) -> float:
    """Table 2: what a copy between two GPUs has beside them: what relays leave of NVLink."""
    settings = replace(settings, direct_first=direct_first)
    runs = [eight_at_once(settings, seed) for seed in range(SEEDS)]
    relayed = mean(each.relayed_bytes / MACHINE.gpus / each.last_s for each in runs)
    return (MACHINE.peer_bytes_per_s - relayed) / GB


def nic_gbytes_per_s(
    settings: PullSettings, nic_bytes_per_s: float, in_host_only: float = 0.0
) -> float:
    """Not in the paper: 512 MB to GPU 0 over its own link and that of a storage NIC, where such a
    share is in host memory alone, which the NIC does not have.
    """
    machine = replace(MACHINE, nics_bytes_per_s=(nic_bytes_per_s,))
    links = 0, *machine.nics
    known = {(0, 0): machine.link_bytes_per_s, (links[1], 0): nic_bytes_per_s}
    from_host = int(TASKS_BYTES * in_host_only)
    copyings = [Copying(TASKS_BYTES - from_host, links=links)]
    if from_host:
        copyings.append(Copying(from_host, links=(0,)))
    rates = LinkRates(machine.link_bytes_per_s, known)
    return carry(machine, settings, copyings, rates).bytes_per_s / GB


def ttft_gain(transfer_share: float, gain: float) -> float:
    """Figure 15: how many times sooner the first token is, if the transfer is `gain` times."""
    return 1 / (1 - transfer_share + transfer_share / gain)


def rows() -> Iterator[LinksRow]:
    """All of them."""

    both = PAPERS, OURS
    for size_mb, paper in ((100, None), (512, None), (1000, "245"), (4000, "245")):
        rates = (bandwidth_gbytes_per_s(size_mb * MB, each) for each in both)
        yield LinksRow("8", f"{size_mb} MB over 8 links", "GB/s", paper, *rates)
    fitted = replace(MACHINE, between_nodes_bytes_per_s=FITTED_BYTES_PER_S)
    for size_mb, paper in ((100, None), (512, None), (1000, "245"), (4000, "245")):
        rates = (bandwidth_gbytes_per_s(size_mb * MB, each, fitted) for each in both)
        what = f"{size_mb} MB, {FITTED_BYTES_PER_S / GB:g} GB/s between nodes"
        yield LinksRow("8, fitted", what, "GB/s", paper, *rates)
    for count, slow_share in ((8, 1.0), (5, 1.0), (5, 0.1)):
        for size_mb in (100, 512):
            rates = (
                over_links_gbytes_per_s(size_mb * MB, each, count, slow_share) for each in both
            )
            what = f"{size_mb} MB, both over {count} links"
            if slow_share < 1:
                what += f", {slow_share:g} of one left"
            yield LinksRow("8, same links", what, "GB/s", None, *rates)
    native = 100 * MB / MACHINE.native_s(100 * MB) / GB
    yield LinksRow("8", "native", "GB/s", "53", native, native)
    for links in (1, 2, 4, 5, 6, 8):
        machine = replace(MACHINE, gpus=links)
        rates = (bandwidth_gbytes_per_s(1000 * MB, each, machine) for each in both)
        paper = "saturated" if links >= 6 else None
        yield LinksRow("9", f"1 GB over {links} links", "GB/s", paper, *rates)
    for left, name in ((1.0, "nothing else"), (0.5, "half of the first taken")):
        best = (1, 1) if left == 1.0 else (1, 2)
        for split in (None, (1, 1), (1, 2)):
            what = "dynamic" if split is None else f"static {split[0]}:{split[1]}"
            paper = "near the best" if split is None else "the best" if split == best else None
            times = (two_links_ms(each, split, left) for each in both)
            yield LinksRow("11", f"512 MB over 2 links, {name}, {what}", "ms", paper, *times)
    for direct_first, paper in ((True, "367.3"), (False, "330.6")):
        what = f"8 copies at once, direct first {'on' if direct_first else 'off'}"
        shares = (100 * relayed_share(each, direct_first=direct_first) for each in both)
        yield LinksRow("table 2", f"{what}, relayed", "%", None, *shares)
        peers = (peer_gbytes_per_s(each, direct_first=direct_first) for each in both)
        yield LinksRow("table 2", f"{what}, between two GPUs", "GB/s", paper, *peers)
    for buffers in (1, 2):
        rates = (
            bandwidth_gbytes_per_s(TASKS_BYTES, replace(each, relay_buffers=buffers))
            for each in both
        )
        paper = "better" if buffers == 2 else None
        yield LinksRow("7", f"512 MB, relay buffers {buffers}", "GB/s", paper, *rates)
    for chunk_mb in (0.5, 1, 2, 2.8, 5, 8, 16):
        rates = (
            bandwidth_gbytes_per_s(TASKS_BYTES, replace(each, chunk_bytes=int(chunk_mb * MB)))
            for each in both
        )
        paper = "best (H2D 2.81, D2H 5.37)" if chunk_mb == 2.8 else None
        yield LinksRow("13a", f"512 MB, micro-tasks of {chunk_mb:g} MB", "GB/s", paper, *rates)
    for depth in (1, 2, 3, 8):
        rates = (bandwidth_gbytes_per_s(TASKS_BYTES, replace(each, depth=depth)) for each in both)
        yield LinksRow(
            "13b", f"512 MB, depth {depth}", "GB/s", "best" if depth == 2 else None, *rates
        )
    for layer_mb in (16, 100):
        for at_once in (1, 2, 4, LAYERS):
            rates = (layers_gbytes_per_s(layer_mb * MB, at_once, each) for each in both)
            what = f"{LAYERS} layers of {layer_mb} MB, {at_once} at once"
            yield LinksRow("layers", what, "GB/s", None, *rates)
    for nic, in_host in (
        (NIC_BYTES_PER_S, 0.0),
        (NIC_BYTES_PER_S, 0.75),
        (SLOW_NIC_BYTES_PER_S, 0.0),
        (SLOW_NIC_BYTES_PER_S, 0.75),
    ):
        rates = (nic_gbytes_per_s(each, nic, in_host) for each in both)
        what = f"512 MB over the own link and a NIC of {nic / GB:g} GB/s"
        if in_host:
            what += f", {in_host:.0%} in host memory alone"
        yield LinksRow("NIC", what, "GB/s", None, *rates)
    sizes = (break_even_mb(each) for each in both)
    yield LinksRow("14", "break-even", "MB", "11.3 (D2H 13)", *sizes)
    size = LONG_PREFIX_BYTES
    gains = [
        MACHINE.native_s(size) * bandwidth_gbytes_per_s(size, each) * GB / size for each in both
    ]
    ttfts = (ttft_gain(LONG_PREFIX_SHARE, gain) for gain in gains)
    yield LinksRow("15", f"TTFT, {LONG_PREFIX_SHARE:.0%} of it transfer", "times", "2.38", *ttfts)
