"""How a supervisor has processes load side by side, and begin in its order."""

from __future__ import annotations

import argparse
import os
import sys

WORD_BYTES_MAX = 4096


def add_start_argument(parser: argparse.ArgumentParser) -> None:
    """Add --start-with-stdin."""
    parser.add_argument(
        "--start-with-stdin",
        action="store_true",
        help="begin when a line arrives on standard input (for a supervisor)",
    )


def wait_for_word() -> bool:
    """Block until a line arrives on standard input; false where that has ended instead."""
    return bool(os.read(sys.stdin.fileno(), WORD_BYTES_MAX))
