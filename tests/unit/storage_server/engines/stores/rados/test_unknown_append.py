"""What an append says of a record that it may have stored and that was trimmed since."""

from __future__ import annotations

from typing import NoReturn, cast

import pytest

from objectcache_storage_server.engines.stores.rados.librados import RadosPool
from objectcache_storage_server.engines.stores.rados.log_frames import LogEnd
from objectcache_storage_server.engines.stores.rados.operations import Deadlines
from objectcache_storage_server.engines.stores.rados.rados_log import RadosLog
from objectcache_storage_server.engines.stores.shared_store import StoreTimeout, TrimmedLog


class _OvertakenLog(RadosLog):
    """The library sent the append a second time, whose answer is that the number is taken; by then
    others have appended and trimmed.
    """

    def __init__(self) -> None:
        super().__init__(cast(Deadlines, None), cast(RadosPool, None))
        self._ends: list[LogEnd | None] = [LogEnd(7, 0, 0, 0), None]
        self._reader.frames = _trimmed  # type: ignore[method-assign]

    def _place(
        self, number: int, size_bytes: int, deadline_s: float, *, is_begun: bool
    ) -> LogEnd | None:
        return self._ends.pop(0)

    def _append_at(self, end: LogEnd, frame: bytes, deadline_s: float) -> bool:
        return False


def _trimmed(first: int, wanted_bytes: int, deadline_s: float) -> NoReturn:
    raise TrimmedLog(first + 1)


def test_an_append_whose_number_was_trimmed_meanwhile_is_unknown() -> None:
    with pytest.raises(StoreTimeout, match="record 7 of the log may have been stored"):
        _OvertakenLog().append(7, b"record", 0.0)
