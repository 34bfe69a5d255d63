"""One place among the supervised processes, and who fills it."""

from __future__ import annotations

import asyncio

from objectcache_operations.supervisor.child import Child, ChildCommand, SupervisionFailed, say


class Slot:
    """Holds the child that serves and, while it is being replaced, the one that will."""

    def __init__(self, command: ChildCommand) -> None:
        self._command = command
        self.child = Child(command)
        self._successor: Child | None = None
        self._changing = asyncio.Lock()

    async def replace(self) -> None:
        """Start a second process, and stop the first once the second serves.

        Raises `SupervisionFailed` where the second does not get that far; the first serves on then.
        """
        async with self._changing:
            self._successor = Child(self._command)
            try:
                await self._successor.start()
            except SupervisionFailed:
                await self._successor.stop()
                self._successor = None
                raise
            before, self.child = self.child, self._successor
            self._successor = before  # until it has stopped, it is ours to kill
            await before.stop()
            self._successor = None
            say(f"the {self.child.name} was replaced")

    async def start_again(self, ended: Child) -> bool:
        """Start the child that has ended; false where another has replaced it meanwhile.

        Raises as `Child.start` does.
        """
        async with self._changing:
            if self.child is not ended:
                return False
            await ended.start()
            return True

    async def stop(self) -> None:
        """Stop all that runs here."""
        await asyncio.gather(*(child.stop() for child in self._children()))

    def kill(self) -> None:
        """SIGKILL to all that runs here."""
        for child in self._children():
            child.kill()

    def _children(self) -> list[Child]:
        return [self.child, *([self._successor] if self._successor is not None else [])]

    def __repr__(self) -> str:
        return f"<Slot {self.child!r}>"
