from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from objectcache_gateway.bodies.aws_chunked import CHUNK_LINE_BYTES_MAX, AwsChunkedDecoder
from objectcache_schemas.errors import AccessDenied, InvalidRequest, ObjectCacheError
from tests.unit.gateway.request_signing import chunk_signing, encode_chunked

CRC = "x-amz-checksum-crc32c"
TRAILERS = {CRC: "sOO8/Q=="}


def decode(
    pieces: Iterable[bytes],
    *,
    signed: bool = False,
    trailer_names: Sequence[str] = (),
    decoded_length: int | None = None,
    chunk_bytes_min: int = 1,
) -> tuple[bytes, dict[str, str]]:
    signing = chunk_signing() if signed else None
    decoder = AwsChunkedDecoder(
        signing, tuple(trailer_names), decoded_length, chunk_bytes_min=chunk_bytes_min
    )
    payload = b"".join([bytes(part) for piece in pieces for part in decoder.feed(piece)])
    return payload, decoder.finish()


def refusal(
    stream: bytes,
    *,
    signed: bool = False,
    trailer_names: Sequence[str] = (),
    decoded_length: int | None = None,
) -> str:
    with pytest.raises(ObjectCacheError) as refused:
        decode([stream], signed=signed, trailer_names=trailer_names, decoded_length=decoded_length)
    assert isinstance(refused.value, InvalidRequest | AccessDenied)
    return refused.value.code


def split_at(stream: bytes, cuts: Iterable[int]) -> list[bytes]:
    ends = sorted({cut % (len(stream) + 1) for cut in cuts} | {len(stream)})
    return [stream[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def test_amazons_example_of_a_signed_stream_decodes() -> None:
    signatures = [
        "ad80c730a21e5b8d04586a2213dd63b9a0e99e0e2307b0ade35a65485a288648",
        "0055627c9e194cb4542bae2aa5492e3c1575bbb81b612b7d234b86a503ef5497",
        "b6c6ea8a5354eaf15b3cb7646744f4275b71ea724fed81ceb9323e279d449df9",
    ]
    stream = b""
    for size_bytes, signature in zip((65536, 1024, 0), signatures, strict=True):
        line = f"{size_bytes:x};chunk-signature={signature}\r\n".encode()
        stream += line + b"a" * size_bytes + b"\r\n"
    assert len(stream) == 66824
    payload, trailers = decode([stream], signed=True, decoded_length=66560, chunk_bytes_min=8192)
    assert (payload, trailers) == (b"a" * 66560, {})


def test_amazons_example_of_a_signed_trailer_decodes() -> None:
    seed = "106e2a8a18243abcf37539882f36619c00e2dfc72633413f02d3b74544bfeb8e"
    signatures = [
        "b474d8862b1487a5145d686f57f013e54db672cee1c953b3010fb58501ef5aa2",
        "1c1344b170168f8e65b41376b44b20fe354e373826ccbbe2c1d40a8cae51e5c7",
        "2ca2aba2005185cf7159c6277faf83795951dd77a3a99e6e65d5c9f85863f992",
    ]
    last = "d81f82fc3505edab99d459891051a732e8730629a2e4a59689829ca17fe2e435"
    stream = b""
    for size_bytes, signature in zip((65536, 1024, 0), signatures, strict=True):
        line = f"{size_bytes:x};chunk-signature={signature}\r\n".encode()
        stream += line + b"a" * size_bytes + (b"\r\n" if size_bytes else b"")
    stream += f"{CRC}:sOO8/Q==\r\nx-amz-trailer-signature:{last}\r\n\r\n".encode()
    decoder = AwsChunkedDecoder(chunk_signing(seed), (CRC,), 66560)
    assert b"".join(decoder.feed(stream)) == b"a" * 66560
    assert decoder.finish() == TRAILERS


STREAMS: list[tuple[bool, Mapping[str, str], bool]] = [
    (False, {}, False),
    (False, TRAILERS, False),
    (False, TRAILERS, True),
    (True, {}, False),
    (True, TRAILERS, False),
    (True, TRAILERS, True),
]


@pytest.mark.parametrize(("signed", "trailers", "minio"), STREAMS)
def test_every_form_of_an_empty_body_decodes(
    signed: bool, trailers: Mapping[str, str], minio: bool
) -> None:
    stream = encode_chunked([], trailers, signed=signed, minio_trailers=minio)
    decoded = decode([stream], signed=signed, trailer_names=list(trailers), decoded_length=0)
    assert decoded == (b"", trailers)


@given(
    chunks=st.lists(st.binary(min_size=1, max_size=40), max_size=5),
    cuts=st.lists(st.integers(0, 10_000), max_size=12),
    form=st.sampled_from(STREAMS),
)
@example(chunks=[b"\r\n0\r\n\r\n"], cuts=range(200), form=STREAMS[1])
@example(chunks=[b"abc", b"d"], cuts=range(1000), form=STREAMS[4])
def test_any_split_of_a_stream_gives_the_same_payload(
    chunks: list[bytes], cuts: Iterable[int], form: tuple[bool, Mapping[str, str], bool]
) -> None:
    signed, trailers, minio = form
    stream = encode_chunked(chunks, trailers, signed=signed, minio_trailers=minio)
    payload = b"".join(chunks)
    decoded = decode(
        split_at(stream, cuts),
        signed=signed,
        trailer_names=list(trailers),
        decoded_length=len(payload),
    )
    assert decoded == (payload, trailers)


@given(
    chunks=st.lists(st.binary(min_size=1, max_size=30), min_size=1, max_size=3),
    position=st.integers(0, 10_000),
    value=st.integers(0, 255),
    form=st.sampled_from(STREAMS[3:]),
)
def test_any_corrupted_byte_of_a_signed_stream_is_refused(
    chunks: list[bytes], position: int, value: int, form: tuple[bool, Mapping[str, str], bool]
) -> None:
    signed, trailers, minio = form
    stream = bytearray(encode_chunked(chunks, trailers, signed=signed, minio_trailers=minio))
    position %= len(stream)
    original, stream[position] = stream[position], value
    # The letters of a hex size and of a trailer's name may have either case.
    if chr(original).lower() == chr(value).lower():
        return
    code = refusal(bytes(stream), signed=signed, trailer_names=list(trailers))
    assert code in (
        "InvalidRequest",
        "IncompleteBody",
        "SignatureDoesNotMatch",
        "MalformedTrailerError",
    )


def test_every_corrupted_byte_of_one_signed_stream_is_refused() -> None:
    stream = encode_chunked([b"0123456789" * 2, b"abc"], TRAILERS, signed=True)
    for position, original in enumerate(stream):
        for value in {original ^ 1, original ^ 0x80, ord("\r"), ord("\n"), ord(" ")} - {original}:
            corrupted = stream[:position] + bytes([value]) + stream[position + 1 :]
            assert refusal(corrupted, signed=True, trailer_names=[CRC])


@given(
    stream=st.sampled_from(STREAMS).map(
        lambda form: encode_chunked([b"abc", b"de"], form[1], signed=form[0])
    ),
    kept=st.integers(0, 10_000),
)
def test_a_stream_that_ends_early_is_never_taken_for_whole(stream: bytes, kept: int) -> None:
    signed = b"chunk-signature" in stream
    names = [CRC] if CRC.encode() in stream else []
    assert refusal(stream[: kept % len(stream)], signed=signed, trailer_names=names) in (
        "IncompleteBody"
    )


@given(st.binary(max_size=300), st.booleans())
def test_arbitrary_bytes_are_refused_or_decoded_but_never_crash(data: bytes, signed: bool) -> None:
    try:
        decode([data], signed=signed, trailer_names=[CRC])
    except (InvalidRequest, AccessDenied):
        return
    assert not signed


def test_large_pieces_are_views_of_what_was_fed() -> None:
    data = bytes(100_000)
    stream = encode_chunked([data])
    decoder = AwsChunkedDecoder(None, (), len(data))
    (piece,) = decoder.feed(stream)
    assert isinstance(piece, memoryview)
    assert piece.obj is stream
    assert len(piece) == len(data)


@pytest.mark.parametrize(
    ("stream", "code"),
    [
        (b"5\nhello\r\n0\r\n\r\n", "InvalidRequest"),
        (b"5\r\nhelloX\n0\r\n\r\n", "InvalidRequest"),
        (b"5\r\nhelloXY0\r\n\r\n", "InvalidRequest"),
        (b"5;chunk-signature=00\r\nhello\r\n0\r\n\r\n", "InvalidRequest"),
        (b"-5\r\nhello\r\n0\r\n\r\n", "InvalidRequest"),
        (b"0x5\r\nhello\r\n0\r\n\r\n", "InvalidRequest"),
        (b" 5\r\nhello\r\n0\r\n\r\n", "InvalidRequest"),
        (b"\r\n", "InvalidRequest"),
        (b"5\r\nhello\r\n0\r\n\r\n\r\n", "InvalidRequest"),
        (b"5\r\nhello\r\n0\r\n\r\nmore", "InvalidRequest"),
        (b"5\r\nhello\r\n0\r\nx-amz-checksum-crc32c:a\r\n\r\n", "MalformedTrailerError"),
        (b"1" * 17 + b"\r\n", "InvalidRequest"),
        (b"1" * CHUNK_LINE_BYTES_MAX, "InvalidRequest"),
    ],
)
def test_broken_framing_is_refused(stream: bytes, code: str) -> None:
    assert refusal(stream) == code


def test_a_line_that_never_ends_is_refused_before_it_is_collected() -> None:
    decoder = AwsChunkedDecoder(None, (), None)
    for _ in range(CHUNK_LINE_BYTES_MAX - 1):
        assert decoder.feed(b"1") == []
    with pytest.raises(InvalidRequest, match="at most 128 bytes"):
        decoder.feed(b"1")


@pytest.mark.parametrize(
    "tail",
    [
        b"",
        b"x-amz-checksum-sha1:sOO8/Q==\r\n",
        b"x-amz-checksum-crc32c:sOO8/Q==\r\nx-amz-checksum-crc32c:sOO8/Q==\r\n",
        b"x-amz-checksum-crc32c:sOO8/Q==\r\nx-amz-trailer-signature:00\r\n",
        b"x-amz-checksum-crc32c=sOO8/Q==\r\n",
        b"x-amz-checksum-crc32c:\xff\r\n",
        b":\r\n",
        b"x-amz-checksum-crc32c:sOO8/Q==\nx-amz-checksum-crc32c:sOO8/Q==\r\n",
    ],
)
def test_trailers_other_than_those_announced_are_refused(tail: bytes) -> None:
    stream = b"0\r\n" + tail + b"\r\n"
    assert refusal(stream, trailer_names=[CRC]) == "MalformedTrailerError"


def test_signed_trailers_need_their_signature() -> None:
    stream = encode_chunked([b"abc"], TRAILERS, signed=True)
    position = stream.index(b"x-amz-trailer-signature")
    unsigned = stream[:position] + b"\r\n"
    assert refusal(unsigned, signed=True, trailer_names=[CRC]) == "MalformedTrailerError"
    wrong = stream.replace(b"sOO8/Q==", b"sOO8/A==")
    assert refusal(wrong, signed=True, trailer_names=[CRC]) == "SignatureDoesNotMatch"


def test_chunks_that_change_places_are_refused() -> None:
    first = encode_chunked([b"aaa", b"bbb"], signed=True)
    line_bytes = len("3;chunk-signature=") + 64 + 2 + 3 + 2
    swapped = first[line_bytes : 2 * line_bytes] + first[:line_bytes] + first[2 * line_bytes :]
    assert refusal(swapped, signed=True) == "SignatureDoesNotMatch"


def test_the_signature_of_the_last_chunk_is_checked() -> None:
    stream = encode_chunked([b"abc"], signed=True)
    position = stream.rindex(b"=") + 1
    forged = stream[:position] + b"0" * 64 + b"\r\n\r\n"
    assert refusal(forged, signed=True) == "SignatureDoesNotMatch"


def test_a_stream_signed_for_another_request_is_refused() -> None:
    stream = encode_chunked([b"abc"], signed=True)
    other = dataclasses.replace(chunk_signing(), seed_signature="0" * 64)
    decoder = AwsChunkedDecoder(other, (), 3)
    with pytest.raises(AccessDenied) as refused:
        decoder.feed(stream)
    assert refused.value.code == "SignatureDoesNotMatch"


@pytest.mark.parametrize(("announced", "code"), [(4, "IncompleteBody"), (6, "IncompleteBody")])
def test_a_payload_of_another_length_than_announced_is_refused(announced: int, code: str) -> None:
    assert refusal(encode_chunked([b"hello"]), decoded_length=announced) == code


def test_a_huge_chunk_is_refused_at_its_first_line() -> None:
    decoder = AwsChunkedDecoder(None, (), 5)
    with pytest.raises(InvalidRequest, match="announced 5"):
        decoder.feed(b"ffffffffffffffff\r\n")


def test_only_the_last_chunk_may_be_small() -> None:
    small, large = bytes(100), bytes(8192)
    assert decode([encode_chunked([large, small])], chunk_bytes_min=8192)[0] == large + small
    with pytest.raises(InvalidRequest) as refused:
        decode([encode_chunked([small, large])], chunk_bytes_min=8192)
    assert refused.value.code == "InvalidChunkSizeError"


def test_after_a_refusal_the_stream_cannot_end_well() -> None:
    decoder = AwsChunkedDecoder(None, (), 5)
    with pytest.raises(InvalidRequest):
        decoder.feed(b"nonsense\r\n")
    for attempt in (lambda: decoder.feed(b"0\r\n\r\n"), decoder.finish):
        with pytest.raises(InvalidRequest):
            attempt()


def test_the_state_shows_in_the_repr() -> None:
    decoder = AwsChunkedDecoder(None, (), 5)
    decoder.feed(b"5\r\nhe")
    assert repr(decoder) == "<AwsChunkedDecoder 5 bytes, next is the data of a chunk>"
