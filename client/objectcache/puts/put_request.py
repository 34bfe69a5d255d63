"""One put, as all ways of sending it need it."""

from __future__ import annotations

from dataclasses import dataclass

from objectcache.core import TransportChoice
from objectcache_schemas.descriptor import Descriptor


@dataclass(frozen=True, slots=True)
class PutRequest:
    """What is stored where, and how its bytes may reach the server.

    `timeout_s` bounds every silence of the server, except that it may take its time to store what
    it reads by itself. `encoding` is that in which slices are sent, AUTO_ENCODING where the client
    chooses, or empty; `element_bytes` are those of one of their numbers, where that is known.
    """

    bucket: str
    descriptor: Descriptor
    transport: TransportChoice
    timeout_s: float
    encoding: str = ""
    element_bytes: int | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Chunks, layers, bytes of a slice."""
        descriptor = self.descriptor
        return (
            len(descriptor.chunk_keys),
            descriptor.num_layers,
            descriptor.per_layer_chunk_bytes,
        )

    @property
    def demands_registered_memory(self) -> bool:
        """Whether the body will not do."""
        return self.transport not in (TransportChoice.AUTO, TransportChoice.BODY)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the whole payload as it is sent."""
        return self.descriptor.put_bytes

    @property
    def chunks_bytes(self) -> int:
        """Bytes of all chunks."""
        return self.descriptor.payload_bytes(len(self.descriptor.chunk_keys))
