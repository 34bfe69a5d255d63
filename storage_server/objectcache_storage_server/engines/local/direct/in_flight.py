"""Requests that outlive the process that made them.

A process that is killed does not take its io_uring requests with it, and a late write would land in
space that the next process has given out again. A request holds the open file that it was made
with, and so the lock on it.
"""

from __future__ import annotations

import fcntl
import time

LOCK_TIMEOUT_S = 30.0
LOCK_RETRY_S = 0.01


def lock_when_idle(file_descriptor: int) -> None:
    """Lock an open file or device for its requests, once nobody's are in flight on another opening
    of it that was locked so.

    Raises `OSError` (EAGAIN) where that takes over LOCK_TIMEOUT_S.
    """
    deadline_s = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(file_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                raise
            time.sleep(LOCK_RETRY_S)
        else:
            return
