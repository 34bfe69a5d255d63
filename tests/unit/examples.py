"""How many examples the property tests try, and rounds the races have. A run of all tests has few
of each, and every run others; TEST_EXAMPLES=20 has twenty times as many, for whoever changed what
they judge.
"""

from __future__ import annotations

import os

_TIMES = int(os.environ.get("TEST_EXAMPLES", "1"))


def examples(count: int) -> int:
    """Instead of `count`, which are tried where nothing else is asked for."""
    return count * _TIMES
