"""An encoded payload in the body of a response."""

from __future__ import annotations

from bisect import bisect_right

from objectcache.channel.http_channel import GatewayExchange
from objectcache.deliveries.encoded.wire_payload import WirePayload
from objectcache.deliveries.layer_progress import LayerProgress
from objectcache.deliveries.receivers import PIECE_BYTES_MAX, ExchangeReceiver
from objectcache.landing.regions import Landing
from objectcache_schemas.errors import DamagedData


class EncodedBodyReceiver(ExchangeReceiver):
    """Reads the directory, and then layer by layer what it says."""

    def __init__(
        self,
        exchange: GatewayExchange,
        landing: Landing,
        progress: LayerProgress,
        wire: WirePayload,
        directory_bytes: int,
        payload_bytes: int,
    ) -> None:
        super().__init__(exchange, landing, progress)
        self._wire = wire
        self._ends: tuple[int, ...] = (
            directory_bytes,
        )  # of what is read: the directory, then each layer
        self._payload_bytes = payload_bytes
        self._received_bytes = 0

    def _receive(self) -> None:
        view = self._landing.array.data
        while self._received_bytes < self._payload_bytes and not self._cancelled:
            begin = self._received_bytes
            end = self._ends[bisect_right(self._ends, begin)]
            wanted = view[begin : min(end, begin + PIECE_BYTES_MAX)]
            count = self._exchange.readinto(wanted)
            self._received_bytes += count
            self._progress.stir()
            if count < len(wanted):
                missing_bytes = self._payload_bytes - self._received_bytes
                self._progress.fail(f"the body was cut, {missing_bytes} bytes are missing")
                return
            if self._received_bytes == self._ends[0] and len(self._ends) == 1:
                self._read_directory()
            layers = bisect_right(self._ends, self._received_bytes) - 1
            self._progress.advance(self._progress.first_layer + layers)

    def _read_directory(self) -> None:
        directory = self._wire.directory
        if directory.payload_bytes != self._payload_bytes:
            raise DamagedData(
                f"a directory of {directory.payload_bytes} bytes of payload came with "
                f"{self._payload_bytes}"
            )
        self._ends = directory.layer_offsets

    def _let_go(self) -> None:
        if self._received_bytes == self._payload_bytes:
            self._exchange.finish()
        else:
            self._exchange.abandon()
        self._landing.settle()
