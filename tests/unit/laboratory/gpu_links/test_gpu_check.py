"""What `objectcache gpu check` finds, on emulated devices; and that it says where there is none."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from typer.testing import CliRunner

from objectcache.gpu.cuda_device import CudaDevice
from objectcache.gpu.device import Device, Direction, Way
from objectcache_laboratory.gpu_links.check import (
    LAYOUTS,
    PART_BYTES,
    check_copies,
    check_relays,
)
from objectcache_operations.console.app import app
from objectcache_operations.console.gpu_check import report
from objectcache_schemas.errors import InvalidRequest, Unavailable
from objectcache_schemas.limits import MIB
from tests.emulated_device import EmulatedDevice


class _Misplacing(EmulatedDevice):
    """The first byte of what is saved is another."""

    def moves(self, direction: Direction, host: int, device: int, count_bytes: int) -> None:
        super().moves(direction, host, device, count_bytes)
        if direction is Direction.SAVE:
            self.write(host, bytes([self.read(host, 1)[0] ^ 1]))


def printed(devices: list[Device]) -> tuple[bool, str]:
    out = io.StringIO()
    is_right = report(devices, MIB, Console(file=out, width=200))
    return is_right, out.getvalue()


def test_every_way_layout_and_direction_is_compared_beside_one_copy() -> None:
    checks = list(check_copies([EmulatedDevice()], MIB))
    assert {check.what for check in checks} == {
        *(f"{direction.value}, one copy" for direction in Direction),
        *(
            f"{direction.value}, {way.value}, {layout}"
            for direction in Direction
            for way in Way
            for layout in LAYOUTS
        ),
    }
    assert all(check.is_right and check.bytes_per_s > 0 for check in checks)


def test_wrong_bytes_are_found_where_they_are() -> None:
    checks = list(check_copies([_Misplacing()], MIB))
    assert {check.is_right for check in checks if check.what.startswith("load")} == {True}
    assert {check.is_right for check in checks if check.what.startswith("save")} == {False}
    is_right, text = printed([_Misplacing()])
    assert not is_right
    assert "WRONG" in text


def test_each_relay_has_a_verdict_and_its_reason() -> None:
    first = EmulatedDevice(400 * MIB)
    slow = EmulatedDevice(400 * MIB, beside=first)
    slow.peer_link.limit(4 * MIB)  # slower than the own link is on a busy machine
    alone = EmulatedDevice()
    verdicts = {
        (each.link, each.gpu): each.why_not for each in check_relays([first, slow, alone], MIB)
    }
    assert verdicts.keys() == {(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)}
    assert "of the link" in str(verdicts[1, 0])
    assert "cannot reach" in str(verdicts[2, 0])


def test_the_report_says_what_is_on_and_off() -> None:
    first = EmulatedDevice()
    is_right, text = printed([first, EmulatedDevice()])
    assert is_right
    assert "GPU 1 over the link of GPU 0: off, <" in text
    assert "one latent" in text
    assert "Other GPUs' links: off, there is one GPU." in printed([first])[1]


def test_the_report_says_where_host_memory_is_and_how_near_links_are() -> None:
    first = EmulatedDevice(node=0)
    far = EmulatedDevice(beside=first, node=1000)  # a node that is not there
    near = EmulatedDevice(beside=first, node=0)
    _, text = printed([first, far, near, EmulatedDevice()])
    assert "GPU 0: its host memory " in text  # whether a process may place it is the system's rule
    assert "GPU 1: its host memory stays where it is made: " in text
    assert "GPU 3: its host memory stays where it is made: the system names no NUMA node" in text
    assert "GPU 0 over the link of GPU 2 (same NUMA node): off, " in text
    assert "GPU 0 over the link of GPU 1 (another NUMA node): off, " in text
    assert "GPU 0 over the link of GPU 3: off, " in text


def test_too_few_bytes_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=str(4 * PART_BYTES)):
        list(check_copies([EmulatedDevice()], 4 * PART_BYTES - 1))


def test_without_a_gpu_the_command_says_so_and_fails() -> None:
    try:
        CudaDevice()
    except Unavailable:
        pass
    else:
        pytest.skip("there is a GPU")
    result = CliRunner().invoke(app, ["gpu", "check"])
    assert result.exit_code == 1
    assert "GPUs cannot be checked here" in result.output
    assert "CUDA" in result.output
