"""What a worker keeps between jobs."""

from __future__ import annotations

import socket

from objectcache_encodings.lossy import LOSSY_DTYPES, KvShape, dtype_text
from objectcache_relay.decoding.worker import LOSSY_MAX, SliceWorker


def test_dtypes_of_several_engines_are_kept_and_not_of_ever_more() -> None:
    texts = [
        dtype_text(LOSSY_DTYPES["lossy-q8"](KvShape(tokens=tokens, heads=1, width=64)))
        for tokens in range(1, LOSSY_MAX + 2)
    ]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = SliceWorker(ours)
        assert worker.dtype("") is None
        first = [worker.dtype(text) for text in texts[:LOSSY_MAX]]
        again = [worker.dtype(text) for text in texts[:LOSSY_MAX]]
        assert all(one is other for one, other in zip(first, again, strict=True))
        worker.dtype(texts[LOSSY_MAX])
        assert worker.dtype(texts[1]) is first[1]
        assert worker.dtype(texts[0]) is not first[0]  # the least recently used
