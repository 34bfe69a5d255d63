"""Layers of a delivery copied to where another one is to have them."""

from __future__ import annotations

import logging

from objectcache.deliveries.delivery import Delivery
from objectcache.deliveries.layer_progress import LayerProgress
from objectcache.deliveries.receivers import LayerReceiver
from objectcache.landing.regions import Landing
from objectcache.thread_reserve import ThreadReserve
from objectcache_schemas.errors import ObjectCacheError

logger = logging.getLogger("objectcache.deliveries.split")


class CopyingReceiver(LayerReceiver):
    """Waits for one layer after the other in a thread, in which it is dequantised too."""

    def __init__(
        self, delivery: Delivery, landing: Landing, progress: LayerProgress, offset_bytes: int
    ) -> None:
        """The first layer goes to `offset_bytes`, each behind the one before."""
        super().__init__(landing, progress)
        self._delivery = delivery
        self._offset_bytes = offset_bytes

    def start(self, threads: ThreadReserve) -> None:
        threads.start(self._run)

    def _stop(self) -> None:
        self._delivery.progress.fail("the delivery was closed")

    def _run(self) -> None:
        try:
            begin = self._offset_bytes
            for layer, payload in self._delivery:
                end = begin + payload.nbytes
                self._landing.array[begin:end].reshape(payload.shape)[...] = payload
                self._progress.advance(layer + 1)
                begin = end
        except ObjectCacheError as error:
            self._progress.fail(error.message, error)
        except Exception as error:
            logger.exception("copying layers failed")
            self._progress.fail(f"copying layers failed: {error!r}", error)
        finally:
            self._delivery.close()
            self._landing.settle()
            self._returned.set()
