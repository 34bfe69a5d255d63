"""Mooncake's trace format: one JSON object a line, a hash id for each block of the prompt.

Source: the traces published with Mooncake (FAST '25). A hash id stands for one block of 512 tokens
and everything before it; the last block of a prompt may be shorter, and has an id of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec

from objectcache_schemas.errors import InvalidRequest

NotNegative = Annotated[int, msgspec.Meta(ge=0)]
HashId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class TraceRequest(msgspec.Struct, frozen=True):
    """One request. Fields that other traces add are ignored."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]  # milliseconds since the trace began
    input_length: Annotated[int, msgspec.Meta(ge=1)]  # tokens
    output_length: NotNegative  # tokens
    hash_ids: Annotated[tuple[HashId, ...], msgspec.Meta(min_length=1)]

    @property
    def arrival_s(self) -> float:
        """Seconds since the trace began."""
        return self.timestamp / 1000


_DECODER = msgspec.json.Decoder(TraceRequest)


def read_trace(file: Path, requests_max: int, block_tokens: int) -> list[TraceRequest]:
    """The first `requests_max` requests; empty lines do not count.

    Raises `InvalidRequest` naming the file, the line and the field that is wrong: `input_length`
    too where its tokens do not fill as many blocks of `block_tokens` as there are hash ids.
    """
    try:
        with file.open("rb") as lines:
            return list(islice(_requests(file, lines, block_tokens), requests_max))
    except OSError as error:
        raise InvalidRequest(f"trace {file}: {error.strerror}") from error


def _requests(file: Path, lines: Iterator[bytes], block_tokens: int) -> Iterator[TraceRequest]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            request = _DECODER.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"trace {file}, line {number}: {error}") from error
        blocks = -(-request.input_length // block_tokens)
        if blocks != len(request.hash_ids):
            raise InvalidRequest(
                f"trace {file}, line {number}: $.input_length {request.input_length} makes "
                f"{blocks} blocks of {block_tokens} tokens, $.hash_ids has {len(request.hash_ids)}"
            )
        yield request
