"""How a server's process hears that it is to end. Call these within its event loop."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

READ_BYTES = 4096


def stop_signals(stop: asyncio.Event) -> None:
    """Set the event on SIGTERM and SIGINT."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)


def end_of_stdin(ended: asyncio.Event) -> None:
    """Set the event when standard input ends: whoever held its other end is gone."""
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), _read_stdin, ended)


def _read_stdin(ended: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), READ_BYTES):
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        ended.set()
