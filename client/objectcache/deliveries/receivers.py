"""The receiving side of a delivery: turns what arrives into layer progress, in a thread."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod

from objectcache.channel.http_channel import Exchange
from objectcache.channel.responses import parse_outcome
from objectcache.deliveries.layer_progress import LayerProgress
from objectcache.deliveries.payload import PayloadShape
from objectcache.memory.landing import Landing
from objectcache.memory.target_session import TargetSession
from objectcache_schemas.errors import ObjectCacheError
from objectcache_schemas.limits import MIB

logger = logging.getLogger("objectcache.deliveries.receivers")
PIECE_BYTES_MAX = 8 * MIB  # between two looks at whether the delivery was closed


class Receiver(ABC):
    """Owns a delivery's exchange and landing until `run` returns, whichever way.

    It returns by itself when the delivery ends. `cancel` makes it return soon: the connection is
    closed, so that the server stops too.
    """

    def __init__(self, exchange: Exchange, landing: Landing, progress: LayerProgress) -> None:
        self._exchange = exchange
        self._landing = landing
        self._progress = progress
        self._cancelled = False
        self._returned = threading.Event()

    def cancel(self) -> None:
        """Give the delivery up. No effect once it has ended."""
        self._cancelled = True
        self._progress.fail("the delivery was closed")
        self._exchange.interrupt()

    def join(self, timeout_s: float) -> bool:
        """Wait until `run` has returned; False when it took longer."""
        return self._returned.wait(timeout_s)

    def run(self) -> None:
        """Receive to the end. Raises nothing: what goes wrong fails the delivery."""
        try:
            self._receive()
        except ObjectCacheError as error:
            self._progress.fail(error.message, error)
        except Exception as error:
            logger.exception("receiving failed")
            self._progress.fail(f"receiving failed: {error!r}", error)
        finally:
            try:
                self._let_go()
            finally:
                self._returned.set()

    @abstractmethod
    def _receive(self) -> None:
        """Receive to the end; raises what went wrong."""

    @abstractmethod
    def _let_go(self) -> None:
        """End the exchange and the landing."""


class BodyReceiver(Receiver):
    """Reads a response body straight into memory, layer by layer."""

    def __init__(
        self, exchange: Exchange, landing: Landing, progress: LayerProgress, shape: PayloadShape
    ) -> None:
        super().__init__(exchange, landing, progress)
        self._shape = shape
        self._received_bytes = 0

    def _receive(self) -> None:
        total_bytes = self._shape.payload_bytes
        view = self._landing.array.data[:total_bytes]
        layer_bytes = self._shape.layer_bytes
        while self._received_bytes < total_bytes and not self._cancelled:
            start = self._received_bytes
            layer_end = start + layer_bytes - start % layer_bytes
            wanted = view[start : min(layer_end, start + PIECE_BYTES_MAX)]
            count = self._exchange.readinto(wanted)
            self._received_bytes += count
            self._progress.advance(self._shape.layers_within(self._received_bytes))
            if count < len(wanted):
                missing_bytes = total_bytes - self._received_bytes
                self._progress.fail(f"the body was cut, {missing_bytes} bytes are missing")
                return
        self._progress.advance(self._shape.layers_within(self._received_bytes))

    def _let_go(self) -> None:
        if self._received_bytes == self._shape.payload_bytes:
            self._exchange.finish()
        else:
            self._exchange.abandon()
        self._landing.settle()


class OutcomeReceiver(Receiver):
    """Waits for the outcome of a delivery whose layers a session announces."""

    def __init__(
        self,
        exchange: Exchange,
        landing: Landing,
        progress: LayerProgress,
        session: TargetSession,
        tag: int,
    ) -> None:
        super().__init__(exchange, landing, progress)
        self._session = session
        self._tag = tag

    def _receive(self) -> None:
        # Layers may come for longer than any one wait; waiters bound the silence.
        self._exchange.wait_forever()
        failure = parse_outcome(self._exchange.read())
        self._exchange.finish()
        if failure is not None:
            raise failure
        self._progress.advance(self._progress.end_layer)

    def _let_go(self) -> None:
        self._exchange.abandon()
        self._session.forget(self._tag)
        if self._progress.complete:
            self._landing.settle()
        else:
            self._landing.withdraw()
