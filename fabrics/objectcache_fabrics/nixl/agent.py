"""One NIXL agent, as both ends of a delivery use it: the one place that meets the library.

An agent belongs to one thread, which makes it, uses it and closes it. No call waits for the peer;
`poll` and `notifications` drive what is under way. Descriptors travel as plain numbers: the
library's own form of them is a pickle, which nobody may load from a peer.

The library's agent lives as long as anything refers to it: a transfer, or the traceback of an
error. So transfers are let go when they are released, and no error of the library's is handed on.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from objectcache_schemas.errors import DeliveryFailed, InvalidRequest, ObjectCacheError, Unavailable

_BACKEND = "UCX"
_HOST_NETLINK = "libnl-route-3.so.200"
_LOG_LEVEL = "LOG_LEVEL="  # UCX's errors name addresses and keys of peers; UCX_LOG_LEVEL goes first

logger = logging.getLogger("objectcache.fabrics.nixl")


class MemoryPiece(NamedTuple):
    """Where some bytes lie: `memory` is DRAM, or VRAM of the GPU `device_id`."""

    address: int
    length_bytes: int
    device_id: int = 0
    memory: str = "DRAM"


def library() -> Any:
    """The package. Raises `Unavailable` with what to install where it is missing."""
    # The wheel brings a netlink library of its own. A host's RDMA drivers load the host's, which
    # would take the wheel's functions for its own and crash when the process exits. Loaded before
    # the wheel's it keeps to itself.
    with suppress(OSError):  # a host without RDMA drivers
        ctypes.CDLL(_HOST_NETLINK, mode=os.RTLD_NOW)
    try:
        import nixl_cu12
    except (ImportError, OSError) as error:
        raise Unavailable(
            f"NIXL is not installed ({error}); pip install --no-deps nixl-cu12"
        ) from error
    logging.getLogger("nixl").setLevel(logging.WARNING)
    return nixl_cu12


class NixlTransfer:
    """A write or read under way, from `NixlAgent.start` to `NixlAgent.release`."""

    __slots__ = ("handle", "is_done")

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.is_done = False


class NixlAgent:
    """An agent over UCX. Whatever the library raises becomes an error of ours."""

    def __init__(self, name: str, devices: str, ucx_settings: str) -> None:
        """`devices` is the network device that UCX may use, empty for all, or those of
        UCX_NET_DEVICES in the environment; `ucx_settings` are more NAME=VALUE of UCX, separated by
        commas.

        Raises `Unavailable` where the package is missing, several devices are named, or UCX refuses
        the settings.
        """
        if "," in devices:  # NIXL would take what follows for another setting
            raise Unavailable(
                f"NIXL is given several network devices ({devices}): give it one, or none and name "
                "them in UCX_NET_DEVICES in the environment"
            )
        package = library()
        self.name = name
        self._registered: list[Any] = []
        self._has_ended = True  # once it was closed
        settings = [] if _LOG_LEVEL in ucx_settings else [_LOG_LEVEL + "fatal"]
        settings += [f"NET_DEVICES={devices}"] if devices else []
        settings += [ucx_settings] if ucx_settings else []
        try:
            configuration = package.nixl_agent_config(enable_prog_thread=False, backends=[])
            self._agent: Any = package.nixl_agent(name, configuration)
            self._agent.create_backend(_BACKEND, {"engine_config": ",".join(settings)})
        except Exception as error:  # the library's classes have no base of their own
            raise Unavailable(f"NIXL cannot be started: {_said(error)}") from error

    def register(self, piece: MemoryPiece) -> Any:
        """Have the memory reached by peers, or written from; returns what `unregister` takes.

        Raises `Unavailable`.
        """
        entry = (piece.address, piece.length_bytes, piece.device_id, "")
        registered = _call(_not_registered, self._agent.register_memory, [entry], piece.memory)
        self._registered.append(registered)
        return registered

    def unregister(self, registered: Any) -> None:
        """Undo `register`. A peer may still reach the memory: nothing may be under way. Raises
        `Unavailable`.
        """
        self._registered.remove(registered)
        _call(_not_registered, self._agent.deregister_memory, registered)

    def metadata(self, registered: Any) -> bytes:
        """What a peer has to load to reach the memory. Raises `Unavailable`."""
        data: bytes = _call(
            _not_registered, self._agent.get_partial_agent_metadata, registered, True
        )
        return data

    def add_peer(self, metadata: bytes) -> str:
        """Load a peer's metadata, again and again as it registers more; returns the agent's name.

        Raises `InvalidRequest` where they are none.
        """
        name = _call(_no_metadata, self._agent.add_remote_agent, metadata)
        return name.decode(errors="replace") if isinstance(name, bytes) else str(name)

    def covers(self, peer: str, piece: MemoryPiece) -> bool:
        """Whether what was loaded of a peer covers the whole piece."""
        return bool(
            _call(_no_metadata, self._agent.check_remote_metadata, peer, self._descriptors([piece]))
        )

    def start(
        self,
        operation: str,
        here: Sequence[MemoryPiece],
        there: Sequence[MemoryPiece],
        peer: str,
    ) -> NixlTransfer:
        """Begin a WRITE or READ between pieces of equal lengths; `poll` tells when it is done.

        Pieces of one side are all of one kind of memory. A copy within a host may happen in here.
        Raises `InvalidRequest` for memory that the peer has not registered, `DeliveryFailed` where
        the peer is gone.
        """
        transfer = NixlTransfer(
            _call(
                _translated,
                self._agent.initialize_xfer,
                operation,
                self._descriptors(here),
                self._descriptors(there),
                peer,
            )
        )
        try:
            state = _call(_translated, self._agent.transfer, transfer.handle)
        except (DeliveryFailed, InvalidRequest):
            self.release(transfer)
            raise
        transfer.is_done = state == "DONE"
        return transfer

    def _descriptors(self, pieces: Sequence[MemoryPiece]) -> Any:
        entries = [(piece.address, piece.length_bytes, piece.device_id) for piece in pieces]
        return _call(_translated, self._agent.get_xfer_descs, entries, pieces[0].memory)

    def poll(self, transfer: NixlTransfer) -> bool:
        """Whether the transfer is done; drives it. Raises `DeliveryFailed` where it never will."""
        if not transfer.is_done:
            state = _call(_failed, self._agent.check_xfer_state, transfer.handle)
            transfer.is_done = state == "DONE"
        return transfer.is_done

    def release(self, transfer: NixlTransfer) -> None:
        """Forget a transfer. One that is under way may still move bytes until the agent closes."""
        handle, transfer.handle = transfer.handle, None
        try:
            handle.release()
        except Exception:  # what is under way may refuse; it ends with the agent
            logger.debug("a transfer could not be released")

    def notify(self, peer: str, message: bytes) -> None:
        """Send a message; `notifications` must be called for it to leave. Raises
        `DeliveryFailed`.
        """
        _call(_failed, self._agent.send_notif, peer, message)

    def notifications(self) -> dict[str, list[bytes]]:
        """Messages that have come, by agent; drives everything. Raises `DeliveryFailed`."""
        come: dict[str, list[bytes]] = _call(_failed, self._agent.get_new_notifs)
        return come

    def close(self) -> bool:
        """End all connections: when it returns true, nothing that was under way moves any more.

        All transfers have been released. False where something still refers to the library's agent,
        which lives on and may still move what was under way: its memory must not be used again.
        A repeated call says the same.
        """
        if self._agent is None:
            return self._has_ended
        for registered in self._registered:
            try:
                self._agent.deregister_memory(registered)
            except Exception:
                logger.debug("memory could not be deregistered")
        self._registered.clear()
        inner = weakref.ref(self._agent.agent)
        self._agent = None
        if inner() is not None:
            gc.collect()
        if inner() is not None:
            self._has_ended = False
            logger.error("%r is still referred to: what was under way may go on", self)
        return self._has_ended

    def __repr__(self) -> str:
        return f"<NixlAgent {self.name}>"


def _call(
    translate: Callable[[Exception], ObjectCacheError], function: Any, *arguments: Any
) -> Any:
    """Call the library. Its error is let go before ours is raised: it would hold the agent."""
    try:
        return function(*arguments)
    except Exception as error:  # the library's classes have no base of their own
        failure = translate(error)
    del function, arguments  # the traceback has them
    raise failure


def _translated(error: Exception) -> ObjectCacheError:
    if type(error).__name__ in ("nixlNotFoundError", "nixlInvalidParamError", "nixlMismatchError"):
        return InvalidRequest(f"the peer has not registered this memory: {_said(error)}")
    return _failed(error)


def _failed(error: Exception) -> ObjectCacheError:
    return DeliveryFailed(f"the peer cannot be reached over NIXL: {_said(error)}")


def _not_registered(error: Exception) -> ObjectCacheError:
    return Unavailable(f"NIXL cannot register memory: {_said(error)}")


def _no_metadata(error: Exception) -> ObjectCacheError:
    return InvalidRequest(f"metadata: {_said(error)}")


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
