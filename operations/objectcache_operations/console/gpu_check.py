"""`objectcache gpu check`: what copies to this machine's GPUs do, and what is on or off."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from objectcache.gpu.cuda_device import CudaDevice
from objectcache.gpu.device import Device
from objectcache.gpu.links.pull_settings import OURS
from objectcache_laboratory.gpu_links.check import check_copies, check_nodes, check_relays

_GB = 1e9
_ROW = "{:<4} {:<32} {:<6} {:>8} {:>12}"


def devices_here() -> list[Device]:
    """All GPUs. Raises `Unavailable` where there is none."""
    first = CudaDevice(0)
    return [first, *(CudaDevice(number) for number in range(1, first.cuda.device_count()))]


def report(devices: Sequence[Device], size_bytes: int, console: Console) -> bool:
    """Print what was found, each row when it is; whether all bytes were right. Raises
    `Unavailable`.
    """
    is_right = True
    console.print(_ROW.format("GPU", "what", "bytes", "GB/s", "of one copy"))
    for check in check_copies(devices, size_bytes):
        is_right = is_right and check.is_right
        said = "right" if check.is_right else "WRONG"
        rate, share = f"{check.bytes_per_s / _GB:.2f}", f"{check.of_one_copy:.2f}"
        console.print(_ROW.format(check.gpu, check.what, said, rate, share), highlight=False)
    console.print("Each GPU's own link: off; on by a connector's gpu_copies.")
    for place in check_nodes(devices):
        where = "stays where it is made" if place.why_not else f"is put on NUMA node {place.node}"
        why_not = f": {place.why_not}" if place.why_not else ""
        console.print(f"GPU {place.gpu}: its host memory {where}{why_not}")
    for verdict in check_relays(devices, OURS.chunk_bytes):
        way = f"GPU {verdict.gpu} over the link of GPU {verdict.link}"
        way += _distance(devices[verdict.gpu], devices[verdict.link])
        if verdict.why_not is None:
            console.print(f"{way}: off, works; on by a connector's gpu_copies and gpu_links")
        else:
            console.print(f"{way}: off, {verdict.why_not}")
    if len(devices) == 1:
        console.print("Other GPUs' links: off, there is one GPU.")
    return is_right


def _distance(device: Device, other: Device) -> str:
    if device.node is None or other.node is None:
        return ""
    return " (same NUMA node)" if device.node == other.node else " (another NUMA node)"
