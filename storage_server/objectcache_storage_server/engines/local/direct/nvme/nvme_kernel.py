"""The kernel's NVMe driver: a namespace's character device, /dev/ng<controller>n<namespace>.

Identify goes through ioctl once, when a device is opened; everything else is
`NVME_URING_CMD_IO` (Linux 5.19) on a ring of the calling thread.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import threading
from collections.abc import Generator, Sequence
from pathlib import Path

import numpy as np

from objectcache_schemas.errors import Unavailable
from objectcache_schemas.limits import KIB
from objectcache_storage_server.engines.local.direct.batches import address_of
from objectcache_storage_server.engines.local.direct.in_flight import lock_when_idle
from objectcache_storage_server.engines.local.direct.nvme.nvme_commands import (
    COMMAND_BYTES,
    IDENTIFY_BYTES,
    Identify,
    flush_command,
    identify_command,
)
from objectcache_storage_server.engines.local.direct.nvme.nvme_device import NvmeDevice
from objectcache_storage_server.engines.local.direct.nvme.nvme_identify import (
    DeallocateLimits,
    UnsuitableNamespace,
    parse_controller,
    parse_deallocate_limits,
    parse_namespace,
)
from objectcache_storage_server.engines.local.direct.nvme.nvme_status import as_os_error
from objectcache_storage_server.engines.local.direct.ring import OP_URING_CMD, Ring

# linux/nvme_ioctl.h
IOCTL_ID = 0x4E40
IOCTL_ADMIN_CMD = 0xC048_4E41
URING_CMD_IO = 0xC048_4E80

TRANSFER_BYTES_MAX = 128 * KIB  # where the system does not say what it takes; every one takes this
_GENERIC_NAME = re.compile(r"ng\d+n\d+")
_PAGE_BYTES = 4 * KIB
_TOO_OLD = "; this kernel passes no NVMe commands through io_uring (Linux 5.19 does)"
_REMEDIES = {
    errno.EACCES: "; NVMe commands need CAP_SYS_ADMIN, or on Linux 6.2 write access to the device",
    errno.EPERM: "; allow the device and io_uring (kernel.io_uring_disabled, container rules)",
    errno.ENOSYS: "; this kernel has no io_uring",
    errno.EOPNOTSUPP: _TOO_OLD,
    errno.EINVAL: _TOO_OLD,
    errno.ENOTTY: "; name the character device of a namespace, such as /dev/ng0n1",
}


class KernelNvmeDevice(NvmeDevice):
    """A namespace behind the kernel's driver, claimed so that nobody mounts it meanwhile."""

    def __init__(self, path: Path, depth: int, block_path: Path | None = None) -> None:
        """At most `depth` commands in flight a thread. `block_path` is where the namespace's block
        device is, if not at its usual place. Raises `Unavailable` with a remedy.
        """
        self.name = str(path)
        self._depth = depth
        self._local = threading.local()
        self._descriptors = contextlib.ExitStack()
        with contextlib.ExitStack() as undo, _explained(path):
            undo.callback(self.close)
            name = generic_name(path)
            self.block_path = block_path or Path("/dev") / block_name(name)
            self._claim_block_device(self.block_path)
            self._file_descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            self._descriptors.callback(os.close, self._file_descriptor)
            lock_when_idle(self._file_descriptor)
            self._identify()
            system_max = system_bytes_max(name)
            self.transfer_bytes_max = min(
                self.controller.transfer_bytes_max or system_max, system_max
            )
            self.run([flush_command(self.namespace.nsid)], "NVMe flush")
            undo.pop_all()

    def __repr__(self) -> str:
        return f"<KernelNvmeDevice {self.name} {self.controller.model!r}>"

    def execute(self, commands: Sequence[bytes]) -> list[int]:
        ring = self._ring()
        sqes = ring.prepare(len(commands))
        sqes["opcode"] = OP_URING_CMD
        sqes["fd"] = self._file_descriptor
        sqes["off"] = URING_CMD_IO
        packed = np.frombuffer(b"".join(commands), np.uint8)
        sqes["cmd"][:, :COMMAND_BYTES] = packed.reshape(len(commands), COMMAND_BYTES)
        results: list[int] = ring.run(sqes).tolist()
        return results

    def close(self) -> None:
        self._local = threading.local()  # the last reference to every thread's ring
        self._descriptors.close()

    def _claim_block_device(self, block_device: Path) -> None:
        """Commands ask nobody whether a file system is mounted: the block device's claim does."""
        with contextlib.suppress(FileNotFoundError, PermissionError):
            claim = os.open(block_device, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC)
            self._descriptors.callback(os.close, claim)

    def _identify(self) -> None:
        nsid = fcntl.ioctl(self._file_descriptor, IOCTL_ID)
        self.controller = parse_controller(self._admin(0, Identify.CONTROLLER))
        self.namespace = parse_namespace(nsid, self._admin(nsid, Identify.NAMESPACE))
        try:
            limits = parse_deallocate_limits(self._admin(0, Identify.NVM_CONTROLLER))
        except OSError:  # not known to controllers of NVMe 1
            limits = DeallocateLimits()
        self.deallocate_limits = limits

    def _admin(self, nsid: int, what: Identify) -> bytes:
        data = memoryview(bytearray(IDENTIFY_BYTES))
        command = bytearray(identify_command(nsid, what, address_of(data)))
        status = fcntl.ioctl(self._file_descriptor, IOCTL_ADMIN_CMD, command)
        if status:
            raise as_os_error(status, f"NVMe identify {what.name.lower()}")
        return bytes(data)

    def _ring(self) -> Ring:
        ring: Ring | None = getattr(self._local, "ring", None)
        if ring is None:
            ring = self._local.ring = Ring(self._depth, sqe128=True, cqe32=True)
        return ring


def generic_name(path: Path) -> str:
    """The driver's name (ng0n1) for the character device of a namespace, whatever `path` is called.

    Raises `OSError`, ENOTTY where it is no such device: it is not opened to find out, because to
    another device the same requests may mean anything.
    """
    status = path.stat()
    number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    name = Path("/sys/dev/char", number).resolve().name
    if not stat.S_ISCHR(status.st_mode) or not _GENERIC_NAME.fullmatch(name):
        raise OSError(errno.ENOTTY, "it is no character device of an NVMe namespace")
    return name


def block_name(generic: str) -> str:
    """The block device of the same namespace: nvme0n1 of ng0n1."""
    return generic.replace("ng", "nvme", 1)


def system_bytes_max(generic: str, block_devices: Path = Path("/sys/block")) -> int:
    """What the system maps into one command, in bytes, a power of two so that rows divide evenly.

    The memory of a command is so many pieces at most; in the worst case each is one page, and an
    unaligned buffer touches one more. The system refuses what is larger even where the controller
    would take it.
    """
    queue = block_devices / block_name(generic) / "queue"
    try:
        transfer_bytes = int((queue / "max_hw_sectors_kb").read_text()) * KIB
        segments = int((queue / "max_segments").read_text())
    except (OSError, ValueError):
        return TRANSFER_BYTES_MAX
    found = min(transfer_bytes, (segments - 1) * _PAGE_BYTES)
    return 1 << max(found, _PAGE_BYTES).bit_length() - 1


@contextlib.contextmanager
def _explained(path: Path) -> Generator[None, None, None]:
    """Raise `Unavailable` with what an operator can do about it."""
    try:
        yield
    except UnsuitableNamespace as error:
        raise Unavailable(f"{path} cannot be used: {error}; see nvme format") from error
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "")
        if error.errno == errno.EBUSY:
            remedy = "; it is mounted, or another process uses it"
        raise Unavailable(f"{path} cannot be opened: {error.strerror}{remedy}") from error
