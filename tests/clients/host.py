"""Runs one driver in a process of its own: `python -m tests.clients.host MODULE:CLASS`.

Reads pickled (method, arguments) from standard input and writes pickled (outcome, value). The first
call is the driver's constructor. Standard library only.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from typing import Any, BinaryIO

from tests.clients.driver import NotOffered

ANSWER, REFUSED, NOT_OFFERED = "answer", "refused", "not offered"


def main() -> None:
    """Serve until standard input ends."""
    module, _, name = sys.argv[1].partition(":")
    # What a client prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    driver: Any = None
    while (call := _receive(sys.stdin.buffer)) is not None:
        method, arguments = call
        try:
            if driver is None:
                driver = getattr(importlib.import_module(module), name)(*arguments)
                _send(answers, ANSWER, dict(driver.cannot_name))
            else:
                _send(answers, ANSWER, getattr(driver, method)(*arguments))
        except NotOffered as reason:
            _send(answers, NOT_OFFERED, str(reason))
        except Exception as error:
            _send(answers, REFUSED, f"{type(error).__name__}: {error}")


def _receive(stream: BinaryIO) -> tuple[str, tuple[Any, ...]] | None:
    try:
        call: tuple[str, tuple[Any, ...]] = pickle.load(stream)
    except EOFError:
        return None
    return call


def _send(stream: BinaryIO, outcome: str, value: object) -> None:
    pickle.dump((outcome, value), stream)
    stream.flush()


if __name__ == "__main__":
    main()
