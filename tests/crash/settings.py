"""How long the tests of this folder go on, and from which seed."""

from __future__ import annotations

import os

TIMES = int(os.environ.get("CRASH_TEST_TIMES", "1"))  # as much of everything
SEED = int(os.environ.get("CRASH_TEST_SEED", "20260607"))
