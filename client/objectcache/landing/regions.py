"""Where the bytes of a delivery or put lie, and when that memory is free for something else."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

from objectcache.landing.memory_file import MemoryFile
from objectcache.payload import Bytes
from objectcache.sessions.target_session import TargetSession
from objectcache_schemas.errors import InvalidRequest, Unavailable


class Region(ABC):
    """Memory, and its registrations with the sessions of the moment. Thread-safe."""

    def __init__(self, length_bytes: int) -> None:
        self.length_bytes = length_bytes
        self._registered: dict[TargetSession, bytes] = {}
        self._lock = threading.Lock()

    @abstractmethod
    def array(self) -> Bytes:
        """A fresh base array over the whole memory; views of it keep it alive."""

    @property
    def address(self) -> int:
        """Where the memory begins."""
        return self.array().ctypes.data

    @abstractmethod
    def _register(self, session: TargetSession) -> bytes:
        """Register it; returns the target's id."""

    def _unregistered(self, session: TargetSession) -> None:  # noqa: B027 - most hold nothing
        """The server does not touch the memory any more, or the session has ended."""

    def target_id(self, session: TargetSession) -> bytes:
        """The region's id in the session, registering it where that has not been done.

        Raises `Unavailable` where it cannot be registered.
        """
        with self._lock:
            known = self._registered.get(session)
            self._registered = {one: at for one, at in self._registered.items() if not one.ended}
            if known is not None:
                return known
            try:
                target_id = self._register(session)
            except InvalidRequest as error:
                reason = f"the storage server refused a target: {error.message}"
                raise Unavailable(reason) from error
            self._registered[session] = target_id
            return target_id

    def unregister(self, on_end: Callable[[bool], None]) -> None:
        """Take the region away from every server; `on_end` as in `TargetSession.release`, once for
        all of them.
        """
        with self._lock:
            registered, self._registered = self._registered, {}
        if not registered:
            on_end(True)
            return
        ends = _AllEnded(len(registered), on_end)
        for session, target_id in registered.items():
            self._release(session, target_id, ends.one_ended)

    def unregister_from(self, session: TargetSession, on_end: Callable[[bool], None]) -> None:
        """The same of one session's server."""
        with self._lock:
            target_id = self._registered.pop(session, None)
        if target_id is None:
            on_end(not session.ended)
            return
        self._release(session, target_id, on_end)

    def _release(
        self, session: TargetSession, target_id: bytes, on_end: Callable[[bool], None]
    ) -> None:
        def ended(quiet: bool) -> None:
            self._unregistered(session)
            on_end(quiet)

        session.release(target_id, ended)

    def __repr__(self) -> str:
        state = "registered" if self._registered else "not registered"
        return f"<{type(self).__name__} {self.length_bytes} bytes, {state}>"


class _AllEnded:
    """Tells when so many have ended, and whether all of them were quiet. Thread-safe."""

    def __init__(self, count: int, on_end: Callable[[bool], None]) -> None:
        self._left = count
        self._on_end = on_end
        self._all_quiet = True
        self._lock = threading.Lock()

    def one_ended(self, quiet: bool) -> None:
        with self._lock:
            self._left -= 1
            self._all_quiet &= quiet
            is_last = self._left == 0
        if is_last:
            self._on_end(self._all_quiet)


class SharedRegion(Region):
    """A memory file."""

    def __init__(self, file: MemoryFile) -> None:
        super().__init__(file.length_bytes)
        self.file = file

    def array(self) -> Bytes:
        return self.file.array()

    def _register(self, session: TargetSession) -> bytes:
        return session.register(self.file.fd, self.file.length_bytes)


class Landing:
    """Memory for a delivery or put, until `settle` or `withdraw`; the first call of either counts.

    `on_settled` is called once, on any thread: with True when the server does not touch the memory
    any more, with False when that could not be learned, so that it must never be used again.
    """

    def __init__(
        self,
        array: Bytes,
        region: Region | None,
        on_settled: Callable[[bool], None],
    ) -> None:
        self.array = array
        self.region = region
        self._on_settled = on_settled
        self._lock = threading.Lock()
        self._ended = False

    def settle(self) -> None:
        """The delivery or put has ended, and the server does not touch the memory any more."""
        if self._end():
            self._on_settled(True)

    def withdraw(self) -> None:
        """A server may still be at work: make it stop, and settle when it has."""
        if not self._end():
            return
        if self.region is None:
            self._on_settled(True)
        else:
            self.region.unregister(self._on_settled)

    def lose(self) -> None:
        """The delivery has ended, and a server may write to the memory for ever."""
        if not self._end():
            return
        if self.region is None:
            self._on_settled(False)
        else:
            self.region.unregister(lambda _: self._on_settled(False))

    def _end(self) -> bool:
        with self._lock:
            ended, self._ended = self._ended, True
        return not ended


class SharedLanding(Landing):
    """What the server of one session has of a landing that several servers fill. `withdraw` takes
    the memory away from that server alone.
    """

    def __init__(
        self, whole: Landing, session: TargetSession, on_settled: Callable[[bool], None]
    ) -> None:
        super().__init__(whole.array, whole.region, on_settled)
        self._session = session

    def withdraw(self) -> None:
        assert self.region is not None
        if self._end():
            self.region.unregister_from(self._session, self._on_settled)


def nothing(_quiet: bool) -> None:
    """For memory that nobody waits for."""
