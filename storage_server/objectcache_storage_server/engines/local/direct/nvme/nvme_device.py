"""An NVMe namespace that takes packed commands: the interface, and the kernel's own.

Commands go around the file system and the block layer (IV-B): `NVME_URING_CMD_IO` through io_uring
to the namespace's character device. The controller moves the bytes straight from or to the
caller's memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from objectcache_storage_server.engines.local.direct.nvme.nvme_identify import (
    Controller,
    DeallocateLimits,
    Namespace,
)
from objectcache_storage_server.engines.local.direct.nvme.nvme_status import (
    as_os_error,
    is_worth_repeating,
)

ATTEMPTS_MAX = 4  # of a command that ends with a transient status; the driver repeats none of these


class NvmeDevice(ABC):
    """One namespace. Any thread may call any method, also at the same time."""

    name: str  # for operators
    controller: Controller
    namespace: Namespace
    deallocate_limits: DeallocateLimits
    transfer_bytes_max: int  # that one command may carry, as controller and system allow

    @abstractmethod
    def execute(self, commands: Sequence[bytes]) -> list[int]:
        """Run packed commands, many at once and in no order; returns when all have ended.

        The result of each, in the order of `commands`: 0, an NVMe status field, or a negative
        errno. The memory that they name must stay in place until then. Raises `OSError` where they
        cannot be submitted, and then none is running any more.
        """

    @abstractmethod
    def close(self) -> None:
        """Release descriptors; nothing may be running. Again does nothing."""

    def run(self, commands: Sequence[bytes], operation: str) -> None:
        """`execute`, with what is transient repeated; raises `OSError` for what fails then."""
        for attempts_left in reversed(range(ATTEMPTS_MAX)):
            results = self.execute(commands)
            if not any(results):
                return
            failures = [result for result in results if result]
            failures.sort(key=is_worth_repeating)  # what repeating does not help first
            if not is_worth_repeating(failures[0]) or not attempts_left:
                raise as_os_error(failures[0], operation)
            pairs = zip(commands, results, strict=True)
            commands = [command for command, result in pairs if result]
