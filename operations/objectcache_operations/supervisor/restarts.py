"""What follows the death of a supervised process: pure, time is an argument."""

from __future__ import annotations

import signal
from dataclasses import dataclass

RESTARTS_MAX = 5  # within RESTART_WINDOW_S; a process that dies faster needs a person
RESTART_WINDOW_S = 60.0
BACKOFF_FIRST_S = 0.2  # long enough for sockets to close, short against a client's retries
BACKOFF_FACTOR = 2.0
EXIT_WRONG_SETTINGS = 2  # a server's exit code; starting it again fails the same way


@dataclass(frozen=True, slots=True)
class Restart:
    """Start it again after `delay_s`."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Stop everything; `reason` is for people, `exit_code` for the supervisor's own exit."""

    reason: str
    exit_code: int


class RestartPolicy:
    """Restarts of one process: at most RESTARTS_MAX within RESTART_WINDOW_S, ever later."""

    def __init__(self) -> None:
        self._restarted_s: list[float] = []

    def after_exit(self, exit_code: int, now_s: float) -> Restart | GiveUp:
        """Decide about a process that had been serving and ended with `exit_code` at `now_s`."""
        if exit_code == EXIT_WRONG_SETTINGS:
            return GiveUp("its settings are wrong", EXIT_WRONG_SETTINGS)
        recent_s = [at_s for at_s in self._restarted_s if now_s - at_s < RESTART_WINDOW_S]
        if len(recent_s) >= RESTARTS_MAX:
            return GiveUp(
                f"it was restarted {RESTARTS_MAX} times within {RESTART_WINDOW_S:g} s", exit_code=1
            )
        self._restarted_s = [*recent_s, now_s]
        return Restart(BACKOFF_FIRST_S * BACKOFF_FACTOR ** len(recent_s))

    def __repr__(self) -> str:
        return f"<RestartPolicy {len(self._restarted_s)}/{RESTARTS_MAX} restarts>"


def describe_exit(exit_code: int) -> str:
    """How a process ended, in words; a negative code is the signal that killed it."""
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"
