"""The receiving side of a delivery: turns what arrives into layer progress, in a thread of its own,
or in the session's where the get went over that.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod

from objectcache.channel.http_channel import GatewayExchange
from objectcache.channel.responses import parse_outcome
from objectcache.deliveries.layer_progress import LayerProgress
from objectcache.landing.regions import Landing
from objectcache.payload import PayloadShape
from objectcache.sessions.session_get import SessionGet
from objectcache.sessions.target_session import TargetSession
from objectcache.thread_reserve import ThreadReserve
from objectcache_schemas.errors import ObjectCacheError
from objectcache_schemas.limits import MIB
from objectcache_schemas.messages.sessions import GetEnded

logger = logging.getLogger("objectcache.deliveries.receivers")
PIECE_BYTES_MAX = MIB  # between two looks at whether the delivery was closed, or is silent


class LayerReceiver(ABC):
    """Owns a delivery's landing until the delivery has ended, whichever way.

    It ends by itself. `cancel` makes it end soon, at the server too.
    """

    def __init__(self, landing: Landing, progress: LayerProgress) -> None:
        self._landing = landing
        self._progress = progress
        self._returned = threading.Event()

    @abstractmethod
    def start(self, threads: ThreadReserve) -> None:
        """Receive from now on."""

    def cancel(self) -> None:
        """Give the delivery up. No effect once it has ended."""
        self._progress.fail("the delivery was closed")
        self._stop()

    @abstractmethod
    def _stop(self) -> None:
        """Have the server stop."""

    def join(self, timeout_s: float) -> bool:
        """Wait until nothing is received any more; False when it took longer."""
        return self._returned.wait(timeout_s)


class ExchangeReceiver(LayerReceiver):
    """Reads a response in a thread. It is cancelled by closing its connection."""

    def __init__(
        self, exchange: GatewayExchange, landing: Landing, progress: LayerProgress
    ) -> None:
        super().__init__(landing, progress)
        self._exchange = exchange
        self._cancelled = False
        progress.count_by(lambda: exchange.came_bytes)

    def start(self, threads: ThreadReserve) -> None:
        threads.start(self.run)

    def _stop(self) -> None:
        self._cancelled = True
        self._exchange.interrupt()

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


class BodyReceiver(ExchangeReceiver):
    """Reads a response body straight into memory, layer by layer."""

    def __init__(
        self,
        exchange: GatewayExchange,
        landing: Landing,
        progress: LayerProgress,
        shape: PayloadShape,
        offset_bytes: int = 0,
        row_bytes: int | None = None,
    ) -> None:
        """The first layer lands at `offset_bytes`, each one `row_bytes` after the one before it: by
        default they lie side by side. A chunkwise payload lies in one piece.
        """
        super().__init__(exchange, landing, progress)
        self._shape = shape
        self._offset_bytes = offset_bytes
        self._row_bytes = shape.layer_bytes if row_bytes is None else row_bytes
        self._received_bytes = 0

    def _receive(self) -> None:
        total_bytes = self._shape.payload_bytes
        view = self._landing.array.data
        layer_bytes = self._shape.layer_bytes
        while self._received_bytes < total_bytes and not self._cancelled:
            layer, within_bytes = divmod(self._received_bytes, layer_bytes)
            start = self._offset_bytes + layer * self._row_bytes + within_bytes
            wanted = view[start : start + min(layer_bytes - within_bytes, PIECE_BYTES_MAX)]
            count = self._exchange.readinto(wanted)
            self._received_bytes += count
            self._progress.stir()
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


class OutcomeReceiver(ExchangeReceiver):
    """Waits for the outcome of a delivery whose layers a session announces."""

    def __init__(
        self,
        exchange: GatewayExchange,
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


class SessionReceiver(LayerReceiver):
    """Hears, on the session's thread, of a get that went over the session itself."""

    def __init__(
        self, get: SessionGet, landing: Landing, progress: LayerProgress, session: TargetSession
    ) -> None:
        super().__init__(landing, progress)
        self._get = get
        self._session = session

    def start(self, threads: ThreadReserve) -> None:
        self._get.when_ended(self._ended)

    def _stop(self) -> None:
        self._session.cancel_get(self._get)

    def _ended(self, ended: GetEnded | None) -> None:
        try:
            self._session.forget(self._get.tag)
            if ended is None:
                self._landing.withdraw()
                return
            if ended.error is None:
                self._progress.advance(self._progress.end_layer)
            else:
                error = ObjectCacheError.from_wire(ended.error)
                self._progress.fail(f"{error.code}: {error.message}", error)
            self._landing.settle()
        finally:
            self._returned.set()
