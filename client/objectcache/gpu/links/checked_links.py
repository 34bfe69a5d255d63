"""Links of neighbours that may carry a device's bytes: those that were tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from objectcache.gpu.device import Device, Direction
from objectcache.gpu.host_nodes import HostNodes
from objectcache.gpu.line import LineSettings
from objectcache.gpu.links.link_rates import LinkRates
from objectcache.gpu.links.linked_copies import LinkedCopies
from objectcache.gpu.links.pull_settings import OURS, PullSettings
from objectcache.gpu.links.relay_check import relay_check

_FIRST_BYTES_PER_S = 50e9  # of a link that was not measured: PCIe 5 x16


@dataclass(frozen=True, slots=True)
class CheckedLinks:
    """For a `Copier`. By `checked_links`."""

    device: Device
    relays: tuple[Device, ...]  # over whose links it is reached
    refused: Mapping[Device, str]  # and why
    settings: PullSettings = OURS
    rates: Mapping[Direction, LinkRates] = field(
        default_factory=lambda: {each: LinkRates(_FIRST_BYTES_PER_S) for each in Direction}
    )

    def copies(
        self, direction: Direction, rates: LinkRates, ways: LineSettings | None = None
    ) -> LinkedCopies:
        """Over these links; the device is number 0, and all relay for it alone. Raises
        `Unavailable`.
        """
        relays = frozenset((number, 0) for number in range(1, 1 + len(self.relays)))
        devices = [self.device, *self.relays]
        return LinkedCopies(devices, direction, self.settings, rates, relays=relays, ways=ways)


def checked_links(
    device: Device, neighbours: Sequence[Device], settings: PullSettings = OURS
) -> CheckedLinks:
    """Try each neighbour's link with random bytes (`relay_check`), and leave out those that bring
    other bytes, or bring them slowly, or reach nobody. Those nearest to the device's host memory
    come first, which is put on its node. Nothing else should use the links meanwhile.

    `device` is the calling thread's device afterwards. Raises `Unavailable` where that fails.
    """
    near = HostNodes().nearest_first(device.node, neighbours, lambda each: each.node)
    verdicts = {each: relay_check(each, device, settings.chunk_bytes) for each in near}
    device.enter_thread()
    return CheckedLinks(
        device,
        tuple(each for each, why_not in verdicts.items() if why_not is None),
        {each: why_not for each, why_not in verdicts.items() if why_not is not None},
        settings,
    )
