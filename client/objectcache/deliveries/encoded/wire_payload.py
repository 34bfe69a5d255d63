"""An encoded payload where it landed: its directory, and its layers as they were sent."""

from __future__ import annotations

import time
from collections.abc import Sequence

from objectcache.payload import Bytes, PayloadShape
from objectcache_encodings.decoder import SliceDecoder
from objectcache_encodings.payload_directory import PayloadDirectory
from objectcache_schemas.errors import DamagedData


class WirePayload:
    """The bytes on the wire, from the begin of `memory` on, `length_bytes` or fewer. Of a payload
    whose layers lie elsewhere `memory` has the directory alone.
    """

    def __init__(
        self, memory: Bytes, length_bytes: int, directory_bytes: int, shape: PayloadShape
    ) -> None:
        """`shape` is that of the decoded payload. `decode_s` are seconds that decoding took."""
        self._memory = memory[:length_bytes]
        self._length_bytes = length_bytes
        self._directory_bytes = directory_bytes
        self.shape = shape
        self.decode_s = 0.0
        self._directory: PayloadDirectory | None = None

    @property
    def directory(self) -> PayloadDirectory:
        """Where everything lies; to be asked once the directory has landed, which it has with the
        first layer. Raises `DamagedData` where it is none, or is another payload's.
        """
        if self._directory is None:
            shape = self.shape
            directory = PayloadDirectory.from_bytes(
                self._memory[: self._directory_bytes].data,
                chunk_count=shape.chunk_count,
                layer_count=shape.layer_count,
                slice_bytes=shape.slice_bytes,
            )
            if directory.payload_bytes > self._length_bytes:
                raise DamagedData(
                    f"a directory of {directory.payload_bytes} bytes of payload came with "
                    f"{self._length_bytes}"
                )
            self._directory = directory
        return self._directory

    @property
    def payload_bytes(self) -> int | None:
        """Bytes on the wire; None while the directory is not looked into."""
        return None if self._directory is None else self._directory.payload_bytes

    def layer(self, layer: int) -> Bytes:
        """A layer that is usable, as it was sent: uint8[bytes]."""
        number = layer - self.shape.first_layer
        begin_bytes, end_bytes = self.directory.layer_offsets[number : number + 2]
        return self._memory[begin_bytes:end_bytes]

    def whole(self) -> Bytes:
        """All that came: uint8[bytes], of which the directory comes first."""
        return self._memory[: self.directory.payload_bytes]

    def decode(
        self, layer: int, out: Bytes, decoder: SliceDecoder, keys: Sequence[str] = ()
    ) -> None:
        """Decode a usable layer into `out`, uint8[chunk_count, slice_bytes]. Raises `DamagedData`
        that names the chunk, by its key among `keys`, too.
        """
        begun_s = time.monotonic()
        number = layer - self.shape.first_layer
        self.directory.decode_layer(number, self.layer(layer), out, decoder, keys)
        self.decode_s += time.monotonic() - begun_s

    def let_go(self) -> None:
        """Nothing of it is needed any more but the directory."""
        self._memory = self._memory[:0]
