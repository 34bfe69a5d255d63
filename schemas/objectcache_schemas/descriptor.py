"""The request that names a prefix, its layout and its target (paper, Table 1).

A descriptor is arithmetic, not a manifest: every byte range of a delivery follows from its fields.
"""

from __future__ import annotations

import base64
import binascii
import enum
import math
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, TypeVar, get_type_hints

import msgspec

from objectcache_schemas.compute_windows import WINDOW_S_MAX
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.excerpt import excerpt
from objectcache_schemas.layout import (
    NUM_LAYERS_MAX,
    KvLayout,
    TargetRing,
    TargetRows,
    check_geometry,
    check_int,
)
from objectcache_schemas.limits import (
    KEY_BYTES_MAX,
    KIB,
    MIB,
    NAME_PATTERN,
    NIC_RATE_MAX,
    NIC_RATE_MIN,
    Limits,
)
from objectcache_schemas.received_keys import check_count, received_key, received_keys

T = TypeVar("T")

DESCRIPTOR_VERSION = 1
TARGET_ID_BYTES = 16
SERVER_ID_BYTES = 8  # with which every target's id begins: the storage server that holds it
CONTEXT_TOKENS_MAX = 1 << 40
UTF8_BYTES_MAX = 4  # of one character
MODEL_CHARS_MAX = 128
FINGERPRINT_BYTES_MAX = 256  # of a request; servers keep it with what they learn
RATE_MIN = 64 * KIB  # bytes per second: slower, a slice takes longer than clients wait for anything
ENCODINGS_MAX = 16  # that a reader lists
ENCODED_SLICE_BYTES_MAX = MIB  # of a put's: a frame is checked as a whole, in memory
ENCODED_RATIO_MAX = 16  # of a put's: numbers of KV do not shrink so far, what fills up a disk does
_ENCODING = re.compile(r"[A-Za-z0-9._-]{1,64}")
_NIC = re.compile(NAME_PATTERN)
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class DeliveryMode(enum.Enum):
    """Order of the payload's bytes."""

    AUTO = "auto"  # the server's threshold rule, paper equation 2
    LAYERWISE = "layerwise"  # for each layer, for each chunk, its slice
    CHUNKWISE = "chunkwise"  # chunk after chunk


class OnMissing(enum.Enum):
    """What a get does when a chunk of the prefix is not stored."""

    FAIL = "fail"
    TRUNCATE = "truncate"


class MemoryTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The `rdma_target` map: a part of a registered target, and the tag its events carry.

    The payload of a get is written at `offset_bytes` and must fit `length_bytes`. Layer events of
    the delivery carry `tag`, which the client chooses. The payload of a put is read there, and
    `length_bytes` is its length; it has no events.
    """

    transport: str
    target_id: bytes
    offset_bytes: int
    length_bytes: int
    tag: int

    def __post_init__(self) -> None:
        if len(self.target_id) != TARGET_ID_BYTES:
            raise InvalidRequest(
                f"rdma_target.target_id must be {TARGET_ID_BYTES} bytes", code="InvalidDescriptor"
            )
        for name in ("offset_bytes", "length_bytes", "tag"):
            _check(f"rdma_target.{name}", getattr(self, name), 0, (1 << 63) - 1)


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A checked descriptor. `chunk_keys` are strings; a binary key has become its lowercase hex.

    `parent_key`, in a put alone, is the chunk before the first one in their prefix; None where it
    is not known, or there is none. In a get alone: `context_tokens`, the length of the prompt, and
    `model`, the name of a compute profile, tell the scheduler how long a layer computes where
    `compute_window_s` does not; `rate_bytes_per_s` is the most that the client wants. So do
    `fingerprint`, which says what model computes, on what, and names a profile if there is one of
    that name, and `computed_tokens`, all that the engine computes in the step that consumes this.
    A `compute_window_s` of 0 says that nothing is computed between layers. `part` [first, count]
    says that `chunk_keys` are those from `first` on of a prefix of `count` chunks, of which others
    bring the rest: the target is that of the whole prefix then, and so is the compute window.
    `nic`, in a get alone, is the storage NIC that the payload goes to, by a name of the client's
    own, and `nic_bytes_per_s` what that carries. `encodings`, in a get alone, are those that the
    reader takes: of a name that the server does not know nothing comes. `encoded_bytes`, in a put
    alone, says that its payload is encoded, and of how many bytes, fewer than those of its slices.
    `ring_layers`, in a get into a target alone, is how many places the target has for layers, which
    take them in turn, as the client frees them.

    Raises `InvalidRequest` (code InvalidDescriptor) when built with a value out of bounds.
    """

    chunk_keys: tuple[str, ...]
    num_layers: int
    chunk_tokens: int
    per_layer_chunk_bytes: int
    delivery: DeliveryMode = DeliveryMode.AUTO
    layers: tuple[int, int] | None = None
    on_missing: OnMissing = OnMissing.FAIL
    compute_window_s: float | None = None
    rdma_target: MemoryTarget | None = field(default=None, repr=False)
    parent_key: str | None = None
    context_tokens: int | None = None
    model: str | None = None
    rate_bytes_per_s: float | None = None
    fingerprint: str | None = None
    computed_tokens: int | None = None
    part: tuple[int, int] | None = None
    nic: str | None = None
    nic_bytes_per_s: float | None = None
    encodings: tuple[str, ...] | None = None
    encoded_bytes: int | None = None
    ring_layers: int | None = None

    def __post_init__(self) -> None:
        try:
            check_geometry(self.num_layers, self.chunk_tokens, self.per_layer_chunk_bytes)
        except InvalidRequest as error:
            raise InvalidRequest(error.message, code="InvalidDescriptor") from None
        if not self.chunk_keys:
            raise InvalidRequest(
                "chunk_keys must name at least one chunk", code="InvalidDescriptor"
            )
        if self.layers is not None:
            first, end = self.layers
            if not 0 <= first < end <= self.num_layers:
                raise InvalidRequest(
                    f"layers must be [first, end] with 0 <= first < end <= num_layers "
                    f"({self.num_layers}), got [{first}, {end}]",
                    code="InvalidDescriptor",
                )
        window_s = self.compute_window_s
        if window_s is not None and not 0 <= window_s <= WINDOW_S_MAX:
            raise InvalidRequest(
                f"compute_window_s must be a number of seconds from 0 to {WINDOW_S_MAX:g}",
                code="InvalidDescriptor",
            )
        self._check_hints()
        self._check_part()
        self._check_encoded()
        self._check_ring()

    def _check_part(self) -> None:
        if self.part is None:
            return
        first, count = self.part
        _check("part[1]", count, 1, CONTEXT_TOKENS_MAX)
        if not 0 <= first <= count - len(self.chunk_keys):
            raise InvalidRequest(
                f"part must be [first, count] with chunk_keys, {len(self.chunk_keys)} of them, "
                f"among the count chunks from first on, got [{first}, {count}]",
                code="InvalidDescriptor",
            )
        if self.rdma_target is not None and self.delivery is not DeliveryMode.LAYERWISE:
            raise InvalidRequest(
                "a part of a prefix goes into a target layer by layer; delivery must be layerwise",
                code="InvalidDescriptor",
            )

    def _check_encoded(self) -> None:
        if self.encoded_bytes is None:
            return
        if self.delivery is not DeliveryMode.LAYERWISE:
            raise InvalidRequest(
                "delivery must be layerwise where encoded_bytes is given: frames come layer by "
                "layer",
                code="InvalidDescriptor",
            )
        if self.per_layer_chunk_bytes > ENCODED_SLICE_BYTES_MAX:
            raise InvalidRequest(
                f"per_layer_chunk_bytes is {self.per_layer_chunk_bytes}, and slices over "
                f"{ENCODED_SLICE_BYTES_MAX} bytes are not put encoded: leave encoded_bytes out",
                code="InvalidDescriptor",
            )
        plain_bytes = len(self.chunk_keys) * self.chunk_bytes
        least, most = -(-plain_bytes // ENCODED_RATIO_MAX), plain_bytes - 1
        _check("encoded_bytes", self.encoded_bytes, least, most)

    def _check_ring(self) -> None:
        if self.ring_layers is None:
            return
        _check("ring_layers", self.ring_layers, 1, NUM_LAYERS_MAX)
        if self.delivery is not DeliveryMode.LAYERWISE or self.part is not None:
            raise InvalidRequest(
                "delivery must be layerwise and part nil where ring_layers is given: whole layers "
                "take turns",
                code="InvalidDescriptor",
            )

    def _check_hints(self) -> None:
        if self.context_tokens is not None:
            _check("context_tokens", self.context_tokens, 1, CONTEXT_TOKENS_MAX)
            cached_tokens = len(self.chunk_keys) * self.chunk_tokens
            if self.context_tokens < cached_tokens:
                raise InvalidRequest(
                    f"context_tokens is {self.context_tokens}, but chunk_keys alone hold "
                    f"{cached_tokens} tokens; it is the length of the whole prompt",
                    code="InvalidDescriptor",
                )
        if self.model is not None and not _MODEL.fullmatch(self.model):
            raise InvalidRequest(
                f"model must be 1 to {MODEL_CHARS_MAX} letters, digits, '.', '_', '-' and begin "
                "with a letter or digit",
                code="InvalidDescriptor",
            )
        if self.computed_tokens is not None:
            _check("computed_tokens", self.computed_tokens, 1, CONTEXT_TOKENS_MAX)
        if self.fingerprint is not None:
            _check_fingerprint(self.fingerprint)
        rate = self.rate_bytes_per_s
        if rate is not None and not (math.isfinite(rate) and rate >= RATE_MIN):
            raise InvalidRequest(
                f"rate_bytes_per_s must be a finite number of bytes per second, {RATE_MIN} or more",
                code="InvalidDescriptor",
            )
        _check_encodings(self.encodings)
        try:
            check_nic(self.nic, self.nic_bytes_per_s)
        except InvalidRequest as error:
            raise InvalidRequest(error.message, code="InvalidDescriptor") from None

    @property
    def first_layer(self) -> int:
        """First layer to deliver."""
        return self.layers[0] if self.layers else 0

    @property
    def end_layer(self) -> int:
        """One past the last layer to deliver."""
        return self.layers[1] if self.layers else self.num_layers

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one whole stored chunk: num_layers x per_layer_chunk_bytes."""
        return self.num_layers * self.per_layer_chunk_bytes

    def payload_bytes(self, chunk_count: int) -> int:
        """Bytes delivered for the first `chunk_count` chunks, all asked layers."""
        return chunk_count * (self.end_layer - self.first_layer) * self.per_layer_chunk_bytes

    @property
    def put_bytes(self) -> int:
        """Bytes of a put's payload as it is sent."""
        if self.encoded_bytes is not None:
            return self.encoded_bytes
        return self.payload_bytes(len(self.chunk_keys))

    def target_rows(self, chunk_count: int) -> TargetRows | None:
        """Where the first `chunk_count` chunks of a part lie in the target, counted from
        `offset_bytes`; None for a whole prefix, whose layers lie in one piece.
        """
        if self.part is None:
            return None
        first, prefix_chunks = self.part
        slice_bytes = self.per_layer_chunk_bytes
        return TargetRows(
            first * slice_bytes, chunk_count * slice_bytes, prefix_chunks * slice_bytes
        )

    @property
    def ring_place_bytes(self) -> int | None:
        """Room for a layer in the target; None where each has a place of its own."""
        if self.ring_layers is None or self.rdma_target is None:
            return None
        return self.rdma_target.length_bytes // self.ring_layers

    def target_ring(self, layers_bytes: Sequence[int]) -> TargetRing | None:
        """Where layers of so many bytes lie in the target; None where each has a place of its own.
        Raises `InvalidRequest` where one has no room.
        """
        place_bytes = self.ring_place_bytes
        if place_bytes is None:
            return None
        assert self.ring_layers is not None
        if max(layers_bytes) > place_bytes:
            raise InvalidRequest(
                f"rdma_target.length_bytes divided by ring_layers is {place_bytes}, the longest "
                f"layer has {max(layers_bytes)} bytes",
                code="InvalidDescriptor",
            )
        return TargetRing(self.ring_layers, place_bytes, layers_bytes)

    def window_chunks(self, chunk_count: int) -> int:
        """Chunks of the whole prefix that the engine gets, of which `chunk_count` are delivered."""
        return chunk_count if self.part is None else self.part[1]

    def check_layout(self, layout: KvLayout) -> None:
        """Raise `InvalidRequest` (DescriptorMismatch) where the bucket's layout differs."""
        for name in ("num_layers", "chunk_tokens", "per_layer_chunk_bytes"):
            mine, its = getattr(self, name), getattr(layout, name)
            if mine != its:
                raise InvalidRequest(
                    f"{name} is {mine} in the descriptor and {its} in the bucket's KV layout",
                    code="DescriptorMismatch",
                )

    def to_bytes(self) -> bytes:
        """The descriptor as a msgpack map, fields in the documented order; `parent_key` and what
        follows it only where there is one.
        """
        named = {name: getattr(self, name) for name in _FIELDS}
        wire = {name: value for name, value in named.items() if value is not None or name in _NIL}
        return msgspec.msgpack.encode({"v": DESCRIPTOR_VERSION, **wire})

    @classmethod
    def from_bytes(
        cls, data: bytes | memoryview, limits: Limits, *, of_put: bool = False
    ) -> Descriptor:
        """Parse and check a msgpack map from an untrusted peer, a get's unless it is `of_put`.

        Raises `InvalidRequest` (InvalidDescriptor, DescriptorTooLarge or KeyTooLongError) with a
        message that names the field. Work and memory are linear in `len(data)`, and no keys are
        made where there are too many.
        """
        if len(data) > limits.descriptor_bytes_max:
            raise InvalidRequest(
                f"the descriptor holds {len(data)} bytes, "
                f"limits.descriptor_bytes_max is {limits.descriptor_bytes_max}",
                code="DescriptorTooLarge",
            )
        wire = decode_wire(_DECODER, data, "descriptor")
        _check("v", wire.v, DESCRIPTOR_VERSION, DESCRIPTOR_VERSION)
        parent_key = _checked_parent(wire.parent_key)
        if parent_key is not None and not of_put:
            raise InvalidRequest(
                "parent_key must be nil in a get: it says where a put belongs",
                code="InvalidDescriptor",
            )
        if wire.part is not None and of_put:
            raise InvalidRequest(
                "part must be nil in a put: each put is of a prefix by itself",
                code="InvalidDescriptor",
            )
        if wire.encodings is not None and of_put:
            raise InvalidRequest(
                "encodings must be nil in a put: they are what the reader of a get takes",
                code="InvalidDescriptor",
            )
        if wire.encoded_bytes is not None and not of_put:
            raise InvalidRequest(
                "encoded_bytes must be nil in a get: it is the length of what a put brings",
                code="InvalidDescriptor",
            )
        if wire.encoded_bytes is not None and wire.layers is not None:
            raise InvalidRequest(
                "layers must be nil where encoded_bytes is given: a put brings every layer",
                code="InvalidDescriptor",
            )
        if wire.ring_layers is not None and (of_put or wire.rdma_target is None):
            raise InvalidRequest(
                "ring_layers must be nil in a put, and where there is no rdma_target: it says how "
                "a get goes round in one",
                code="InvalidDescriptor",
            )
        if wire.part is not None:
            _check("part[1]", wire.part[1], 1, limits.chunks_per_descriptor_max)
        wire_fields = {name: getattr(wire, name) for name in _FIELDS}
        wire_fields["chunk_keys"] = _wire_keys(wire.chunk_keys, "descriptor", limits)
        wire_fields["parent_key"] = parent_key
        descriptor = cls(**wire_fields)
        payload_bytes = descriptor.payload_bytes(len(descriptor.chunk_keys))
        if payload_bytes > limits.payload_bytes_max:
            raise InvalidRequest(
                f"the payload would be {payload_bytes} bytes, "
                f"limits.payload_bytes_max is {limits.payload_bytes_max}",
                code="DescriptorTooLarge",
            )
        return descriptor

    @staticmethod
    def target_of(data: bytes) -> MemoryTarget | None:
        """The target that a descriptor names, without a look at its keys.

        Raises `InvalidRequest` where `data` is none.
        """
        target: MemoryTarget | None = decode_wire(_DECODER, data, "descriptor").rdma_target
        return target

    def to_header(self) -> str:
        """The descriptor for `x-objectcache-descriptor`: base64url without padding."""
        return base64.urlsafe_b64encode(self.to_bytes()).rstrip(b"=").decode()

    @classmethod
    def from_header(cls, value: str, limits: Limits) -> Descriptor:
        """Parse the header form; raises as `from_bytes` does."""
        return cls.from_bytes(descriptor_header_bytes(value, limits), limits)


# Keys stay as they came until they were counted; everything else is decoded as it is declared.
_AS_THEY_CAME = {"chunk_keys": msgspec.Raw, "parent_key": msgspec.Raw | msgspec.UnsetType}
_NIL = ("layers", "compute_window_s", "rdma_target")  # sent as nil where there is none
_FIELDS = tuple(one.name for one in fields(Descriptor))


def _wire_field(one: Field[Any], kind: Any) -> tuple[str, Any] | tuple[str, Any, Any]:
    kind = _AS_THEY_CAME.get(one.name, kind)
    if one.default is MISSING:
        return one.name, kind
    return one.name, kind, msgspec.UNSET if one.name in _AS_THEY_CAME else one.default


_TYPES = get_type_hints(Descriptor)
_DECODER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    msgspec.defstruct(
        "_WireDescriptor",
        [("v", int), *(_wire_field(one, _TYPES[one.name]) for one in fields(Descriptor))],
        frozen=True,
        forbid_unknown_fields=True,
        kw_only=True,
    )
)


class _WireMatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    v: int
    chunk_keys: msgspec.Raw


class MatchRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /{bucket}?kv-match`."""

    v: int
    chunk_keys: tuple[str, ...]

    @staticmethod
    def keys_from_bytes(data: bytes, limits: Limits) -> tuple[str, ...]:
        """Parse and check the body; an empty prefix is allowed and matches nothing."""
        if len(data) > limits.descriptor_bytes_max:
            raise InvalidRequest(
                f"the body holds {len(data)} bytes, "
                f"limits.descriptor_bytes_max is {limits.descriptor_bytes_max}",
                code="DescriptorTooLarge",
            )
        wire = decode_wire(_MATCH_DECODER, data, _MATCH)
        _check("v", wire.v, DESCRIPTOR_VERSION, DESCRIPTOR_VERSION)
        return _wire_keys(wire.chunk_keys, _MATCH, limits)


class MatchReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a match: how many leading chunks are stored."""

    v: int
    matched: int


class DeliveryOutcome(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Body of the response to a get with a target: how the delivery ended."""

    v: int
    chunk_count: int
    payload_bytes: int
    error_code: str | None = None  # None: every layer is in place
    error_message: str | None = None
    failed_layer: int | None = None


_MATCH_DECODER = msgspec.msgpack.Decoder(_WireMatch)
_MATCH = "match request"


def descriptor_header_bytes(value: str, limits: Limits) -> bytes:
    """The msgpack bytes behind the header form; raises `InvalidRequest` if it is no base64url."""
    if len(value) > limits.descriptor_header_bytes_max:
        raise InvalidRequest(
            f"the descriptor header holds {len(value)} bytes, limits.descriptor_header_bytes_max "
            f"is {limits.descriptor_header_bytes_max}; use POST ?kv-get",
            code="DescriptorTooLarge",
        )
    try:
        return base64.b64decode(value + "=" * (-len(value) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(
            "x-objectcache-descriptor must be base64url without padding", code="InvalidDescriptor"
        ) from error


def decode_wire(decoder: msgspec.msgpack.Decoder[T], data: bytes | memoryview, what: str) -> T:
    """Decode msgpack from an untrusted peer; raises `InvalidRequest` naming the field."""
    with _named(what):
        return decoder.decode(data)


@contextmanager
def _named(what: str) -> Generator[None]:
    try:
        yield
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{what}: {excerpt(str(error))}", code="InvalidDescriptor") from error


def _wire_keys(raw: msgspec.Raw, what: str, limits: Limits) -> tuple[str, ...]:
    chunks_max = limits.chunks_per_descriptor_max
    with _named(f"{what}: chunk_keys"):
        return checked_keys(received_keys(raw, chunks_max), chunks_max)


def checked_keys(keys: tuple[Any, ...], chunks_max: int) -> tuple[str, ...]:
    """Chunk keys as strings; raises `InvalidRequest` naming the first index that is wrong."""
    check_count(len(keys), chunks_max)
    if _are_plain(keys):
        return keys
    return tuple([_checked_key(key, "chunk_keys", index) for index, key in enumerate(keys)])


def _are_plain(keys: tuple[Any, ...]) -> bool:
    """Whether all are texts with nothing to look at one by one: a look at all together costs a
    tenth.
    """
    if not keys or set(map(type, keys)) != {str} or "" in keys:
        return False
    return max(map(len, keys)) * UTF8_BYTES_MAX <= KEY_BYTES_MAX and "\0" not in "".join(keys)


def _checked_parent(raw: msgspec.Raw | msgspec.UnsetType) -> str | None:
    if isinstance(raw, msgspec.UnsetType):
        return None
    with _named("descriptor: parent_key"):
        wire_key = received_key(raw)
    return None if wire_key is None else _checked_key(wire_key, "parent_key")


def _checked_key(wire_key: object, field_name: str, index: int | None = None) -> str:
    key = wire_key.hex() if isinstance(wire_key, bytes) else wire_key
    if not isinstance(key, str):
        raise _wrong_key(field_name, index, f"must be a string or bytes, got {type(key).__name__}")
    if not key or "\0" in key:
        raise _wrong_key(field_name, index, "must not be empty or hold a NUL")
    if len(key) * UTF8_BYTES_MAX > KEY_BYTES_MAX and len(key.encode()) > KEY_BYTES_MAX:
        what = f"is over {KEY_BYTES_MAX} bytes of UTF-8"
        raise _wrong_key(field_name, index, what, "KeyTooLongError")
    return key


def _wrong_key(
    field_name: str, index: int | None, what: str, code: str = "InvalidDescriptor"
) -> InvalidRequest:
    name = field_name if index is None else f"{field_name}[{index}]"
    return InvalidRequest(f"{name} {what}", code=code)


def _check_fingerprint(fingerprint: str) -> None:
    if not (fingerprint.isprintable() and 1 <= len(fingerprint.encode()) <= FINGERPRINT_BYTES_MAX):
        raise InvalidRequest(
            f"fingerprint must be 1 to {FINGERPRINT_BYTES_MAX} bytes of printable text",
            code="InvalidDescriptor",
        )


def _check_encodings(encodings: tuple[str, ...] | None) -> None:
    if encodings is None:
        return
    if len(encodings) > ENCODINGS_MAX or not all(map(_ENCODING.fullmatch, encodings)):
        raise InvalidRequest(
            f"encodings must be at most {ENCODINGS_MAX} names of 1 to 64 letters, digits, '.', "
            "'_', '-'",
            code="InvalidDescriptor",
        )


def check_nic(nic: str | None, nic_bytes_per_s: float | None) -> None:
    """Raise `InvalidRequest` where these are no NIC's name and rate; None is not known."""
    if nic is not None and not _NIC.match(nic):
        raise InvalidRequest("nic must be 1 to 128 letters, digits and any of _.:@=+~-")
    if nic_bytes_per_s is None:
        return
    if not NIC_RATE_MIN <= nic_bytes_per_s <= NIC_RATE_MAX:  # nor NaN
        raise InvalidRequest(
            f"nic_bytes_per_s must be a number of bytes per second from {NIC_RATE_MIN} to "
            f"{NIC_RATE_MAX:g}"
        )
    if nic is None:
        raise InvalidRequest("nic_bytes_per_s is the rate of a NIC, which nic must name")


def _check(name: str, value: int, lowest: int, highest: int) -> None:
    try:
        check_int(name, value, lowest, highest)
    except InvalidRequest as error:
        raise InvalidRequest(error.message, code="InvalidDescriptor") from None
