"""Requests a second: one bucket of tokens for every tenant and every bucket that has such a quota.

Pure but for its memory: the time is an argument.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping

from objectcache_runtime.shares.token_bucket import TokenBucket

BURST_S = 1.0  # of the rate may come at once
STATES_MAX = 16_384  # the longest untouched is forgotten, and is full then


class RequestTokens:
    """The tokens of all. Not safe from several threads."""

    def __init__(self, states_max: int = STATES_MAX) -> None:
        self._states_max = states_max
        self._states: OrderedDict[str, TokenBucket] = OrderedDict()

    def take(
        self, rates_per_s: Mapping[str, float], wanted: int, now_s: float
    ) -> tuple[int, float]:
        """Take up to `wanted` from all of them alike; returns how many, and with none the seconds
        until there is one.
        """
        states = {name: self._state(name, rate, now_s) for name, rate in rates_per_s.items()}
        taken = min([wanted, *(math.floor(state.left) for state in states.values())])
        for state in states.values():
            state.left -= taken
        if taken:
            return taken, 0.0
        waits_s = [state.wait_s(rates_per_s[name]) for name, state in states.items()]
        return 0, max(waits_s)

    def _state(self, name: str, rate_per_s: float, now_s: float) -> TokenBucket:
        """The tokens as they are now. A rate below one a second still lets one through."""
        state = self._states.setdefault(name, TokenBucket(rate_per_s, BURST_S, now_s))
        self._states.move_to_end(name)
        state.earn(rate_per_s, now_s)
        if len(self._states) > self._states_max:
            self._states.popitem(last=False)
        return state

    def __repr__(self) -> str:
        return f"<RequestTokens {len(self._states)}/{self._states_max}>"
