"""The aws-chunked framing of a streamed upload, taken apart as it arrives. Sans I/O.

    chunk     hex size [";chunk-signature=" 64 hex digits] CRLF  data CRLF
    end       a chunk of size 0 without data, the trailers, CRLF
    trailer   name ":" value CRLF
    signature "x-amz-trailer-signature:" 64 hex digits CRLF, where chunks and trailers are signed

MinIO's clients end trailers with LF, and the block of them with CRLF; that is taken too. Source:
"Signature calculations for chunked uploads" in the Amazon S3 API reference.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import re

from objectcache_gateway.signing.sigv4 import ChunkSigning
from objectcache_schemas.errors import AccessDenied, InvalidRequest
from objectcache_schemas.limits import KIB

CHUNK_BYTES_MIN = 8 * KIB  # S3's own limit, on all but the last; bounds the work for each byte
CHUNK_LINE_BYTES_MAX = 128  # 16 digits, the signature and their punctuation are 99
TRAILER_LINE_BYTES_MAX = 1024  # a name and a checksum; S3 knows no longer ones
TRAILER_SIGNATURE = "x-amz-trailer-signature"

_SIGNED_LINE = re.compile(rb"([0-9a-fA-F]{1,16});chunk-signature=([0-9a-f]{64})\r\n")
_UNSIGNED_LINE = re.compile(rb"([0-9a-fA-F]{1,16})\r\n")
_TRAILER_LINE = re.compile(rb"([A-Za-z0-9-]+):([\x20-\x7e]*)")
_CRLF = b"\r\n"


class _State(enum.Enum):
    CHUNK_LINE = "the size of a chunk"
    DATA = "the data of a chunk"
    DATA_END = "the end of a chunk"
    TRAILERS = "the trailers"
    END = "nothing"
    REFUSED = "nothing, after an error"


class AwsChunkedDecoder:
    """Bytes of the wire in, bytes of the payload out.

    `decoded_length` is that of the payload in bytes, None where it was not announced.
    `trailer_names` are lowercase; each must come once and no other may. With `signing`, every chunk
    and the trailers must carry their signature. Pieces are handed out before the signature of their
    chunk has been seen, so they count only once `finish` has returned.
    """

    def __init__(
        self,
        signing: ChunkSigning | None,
        trailer_names: tuple[str, ...],
        decoded_length: int | None,
        *,
        chunk_bytes_min: int = CHUNK_BYTES_MIN,
    ) -> None:
        self._signing = signing
        self._trailer_names = trailer_names
        self._decoded_length = decoded_length
        self._chunk_bytes_min = chunk_bytes_min
        self._state = _State.CHUNK_LINE
        self._line = b""  # of a line that a feed ended in
        self._size_bytes = 0  # of the payload, with the chunk that is arriving
        self._left_bytes = 0  # of the chunk that is arriving
        self._below_min = False  # the chunk before was too small to be followed by another
        self._previous_signature = signing.seed_signature if signing else ""
        self._claimed_signature = ""
        self._chunk_hash = hashlib.sha256()
        self._trailers: dict[str, str] = {}
        self._trailer_hash = hashlib.sha256()
        self._trailers_signed = signing is None
        self._in_lf_block = False

    def feed(self, data: bytes | memoryview) -> list[bytes | memoryview]:
        """Payload that `data` holds, as views of it.

        Raises `InvalidRequest` where the framing is broken and `AccessDenied`
        (SignatureDoesNotMatch) for a wrong signature; the decoder is of no use afterwards.
        """
        view = memoryview(data).cast("B")
        pieces: list[bytes | memoryview] = []
        position = 0
        while position < len(view):
            if self._state is _State.DATA:
                piece = view[position : position + self._left_bytes]
                position += len(piece)
                self._take_data(piece)
                pieces.append(piece)
            else:
                position = self._take_line(view, position)
        return pieces

    def finish(self) -> dict[str, str]:
        """The trailers, by lowercase name. Raises `InvalidRequest` before the end of the stream."""
        if self._state is not _State.END:
            raise self._refusal(
                f"the aws-chunked body ended where {self._state.value} had to follow",
                "IncompleteBody",
            )
        return dict(self._trailers)

    def _take_data(self, piece: memoryview) -> None:
        if self._signing is not None:
            self._chunk_hash.update(piece)
        self._left_bytes -= len(piece)
        if self._left_bytes == 0:
            self._check_chunk_signature()
            self._state = _State.DATA_END

    def _take_line(self, view: memoryview, position: int) -> int:
        """Take what `view` holds of the next line; returns the position behind it."""
        bytes_max = self._line_bytes_max()
        window = bytes(view[position : position + bytes_max - len(self._line)])
        end = window.find(b"\n") + 1
        self._line += window[:end] if end else window
        if end:
            line, self._line = self._line, b""
            self._take_whole_line(line)
        elif len(self._line) >= bytes_max:
            raise self._refusal(f"{self._state.value} must end after at most {bytes_max} bytes")
        return position + (end or len(window))

    def _line_bytes_max(self) -> int:
        if self._state is _State.CHUNK_LINE:
            return CHUNK_LINE_BYTES_MAX
        if self._state is _State.TRAILERS:
            return TRAILER_LINE_BYTES_MAX
        if self._state is _State.DATA_END:
            return len(_CRLF)
        raise self._refusal("bytes follow the end of the aws-chunked body")

    def _take_whole_line(self, line: bytes) -> None:
        if self._state is _State.CHUNK_LINE:
            self._take_chunk_line(line)
        elif self._state is _State.TRAILERS:
            self._take_trailer_line(line)
        elif line == _CRLF:
            self._state = _State.CHUNK_LINE
        else:
            raise self._refusal("a chunk's data must be followed by CRLF")

    # --- chunks ---

    def _take_chunk_line(self, line: bytes) -> None:
        match = (_SIGNED_LINE if self._signing else _UNSIGNED_LINE).fullmatch(line)
        if match is None:
            needed = "size;chunk-signature=signature" if self._signing else "size"
            raise self._refusal(f"a chunk must begin with {needed}, in hex, and CRLF")
        if self._signing is not None:
            self._claimed_signature = match[2].decode("ascii")
        self._begin_chunk(int(match[1], 16))

    def _begin_chunk(self, size_bytes: int) -> None:
        self._check_size(size_bytes)
        self._size_bytes += size_bytes
        self._left_bytes = size_bytes
        self._below_min = size_bytes < self._chunk_bytes_min
        if size_bytes:
            self._state = _State.DATA
        else:
            self._check_chunk_signature()
            self._state = _State.TRAILERS

    def _check_size(self, size_bytes: int) -> None:
        announced = self._decoded_length
        total_bytes = self._size_bytes + size_bytes
        if size_bytes and self._below_min:
            raise self._refusal(
                f"all chunks but the last must have at least {self._chunk_bytes_min} bytes",
                "InvalidChunkSizeError",
            )
        if announced is not None and (
            total_bytes > announced or (size_bytes == 0 and total_bytes < announced)
        ):
            raise self._refusal(
                f"the chunks hold {total_bytes} bytes so far, "
                f"x-amz-decoded-content-length announced {announced}",
                "IncompleteBody",
            )

    def _check_chunk_signature(self) -> None:
        if self._signing is None:
            return
        expected = self._signing.chunk_signature(
            self._previous_signature, self._chunk_hash.hexdigest()
        )
        self._check_signature(expected, self._claimed_signature, "a chunk's signature")
        self._previous_signature = expected
        self._chunk_hash = hashlib.sha256()

    def _check_signature(self, expected: str, claimed: str, what: str) -> None:
        if not hmac.compare_digest(expected, claimed):
            self._state = _State.REFUSED
            raise AccessDenied(f"{what} does not match", code="SignatureDoesNotMatch")

    # --- trailers ---

    def _take_trailer_line(self, line: bytes) -> None:
        text, is_crlf = (line[:-2], True) if line.endswith(_CRLF) else (line[:-1], False)
        if not text and is_crlf:
            self._end_block()
            return
        match = _TRAILER_LINE.fullmatch(text)
        # A block of LF lines ends with a CRLF of its own; forms are not mixed.
        if match is None or (self._in_lf_block and is_crlf):
            raise self._refusal("a trailer must be name:value and CRLF", "MalformedTrailerError")
        self._in_lf_block = not is_crlf
        self._take_trailer(match[1].decode().lower(), match[2].decode().strip())

    def _end_block(self) -> None:
        if self._in_lf_block:
            self._in_lf_block = False
            return
        self._check_all_announced()
        if not self._trailers_signed and self._trailer_names:
            raise self._refusal(f"{TRAILER_SIGNATURE} is missing", "MalformedTrailerError")
        self._state = _State.END

    def _take_trailer(self, name: str, value: str) -> None:
        if name == TRAILER_SIGNATURE and not self._trailers_signed and self._trailer_names:
            self._check_all_announced()
            self._check_trailer_signature(value)
            return
        if name not in self._trailer_names or name in self._trailers:
            raise self._refusal(
                f"the trailer {name} was not announced in x-amz-trailer, or comes twice",
                "MalformedTrailerError",
            )
        self._trailers[name] = value
        self._trailer_hash.update(f"{name}:{value}\n".encode())

    def _check_all_announced(self) -> None:
        missing = [name for name in self._trailer_names if name not in self._trailers]
        if missing:
            raise self._refusal(f"the trailer {missing[0]} is missing", "MalformedTrailerError")

    def _check_trailer_signature(self, claimed: str) -> None:
        assert self._signing is not None
        expected = self._signing.trailer_signature(
            self._previous_signature, self._trailer_hash.hexdigest()
        )
        self._check_signature(expected, claimed, f"{TRAILER_SIGNATURE}")
        self._trailers_signed = True

    def _refusal(self, message: str, code: str = "InvalidRequest") -> InvalidRequest:
        self._state = _State.REFUSED
        return InvalidRequest(message, code=code)

    def __repr__(self) -> str:
        return f"<AwsChunkedDecoder {self._size_bytes} bytes, next is {self._state.value}>"
