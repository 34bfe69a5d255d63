"""Who may append next: a server that lost several races asks for its turn, and the others wait.

A large change takes longer to judge and to append than small ones, so beside a server that makes
small ones all the time it would lose every race. It asks by a record, which is small and wins as
often as any; nobody appends anything after it without having read it.

Nor does that record win where a server makes one small record after the other: who has appended
knows the log's end, and everybody else has to read it first. So after many in a row, without a
pause and without another server's between, it waits for as long as a few of them took. Pure.
"""

from __future__ import annotations

TURN_S_MIN = 0.05
TURN_S_MAX = 1.0  # that others wait for a server which may have died
RUN_MAX = 200  # records in a row
YIELDS_FOR = 3  # times what one of them took: to read the last one, and to append


class AppendTurns:
    """The turns that were asked for, in the order of the log."""

    def __init__(self) -> None:
        self._until_s: dict[int, float] = {}  # by writer
        self._newest: int | None = None  # who made the newest record
        self._run = 0  # records that it has made in a row
        self._seen_s = 0.0  # when the newest was
        self._began_s = 0.0  # when this server began its own last
        self._yields_until_s: float | None = None

    def saw(self, writer: int, wanted_s: float | None, now_s: float) -> None:
        """A record was applied: its writer asks for a turn of so long, or has had it."""
        if writer != self._newest:
            self._newest, self._run, self._yields_until_s = writer, 0, None
        self._run += 1
        self._seen_s = now_s
        if wanted_s is None:
            self._until_s.pop(writer, None)
        elif writer not in self._until_s:
            self._until_s[writer] = now_s + min(max(wanted_s, TURN_S_MIN), TURN_S_MAX)

    def wait_s(self, own_writer: int, now_s: float) -> float:
        """How long this server is to wait, unless the others append before."""
        wait_s = 0.0
        for writer, until_s in list(self._until_s.items()):
            if until_s <= now_s:
                del self._until_s[writer]
            elif writer == own_writer:
                break
            else:
                wait_s = until_s - now_s
        wait_s = max(wait_s, self._yield_s(own_writer, now_s))
        if not wait_s:
            self._began_s = now_s
        return wait_s

    def _yield_s(self, own_writer: int, now_s: float) -> float:
        """How long to leave the log to others, after too many records in a row."""
        if self._newest != own_writer or self._run < RUN_MAX:
            return 0.0
        if self._yields_until_s is None:
            took_s = self._seen_s - self._began_s
            paused_s = now_s - self._seen_s
            yields_s = min(YIELDS_FOR * took_s, TURN_S_MAX) - paused_s
            self._yields_until_s = now_s + yields_s
        if now_s < self._yields_until_s:
            return self._yields_until_s - now_s
        self._run, self._yields_until_s = 0, None
        return 0.0
