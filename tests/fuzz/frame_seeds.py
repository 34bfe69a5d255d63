"""Messages of the storage server's sockets, made from their types: only their values are wild."""

from __future__ import annotations

import random
from typing import Any, get_args

import msgspec
from msgspec import inspect

from objectcache_schemas.conversations import GatewayRequest, PutEnd, StorageReply
from objectcache_schemas.messages.frames import LENGTH
from objectcache_schemas.messages.sessions import TargetRequest

BUCKET = "fuzz-bucket"
# These change what a server does for all of its clients, or make it work for minutes.
_LEFT_OUT = frozenset(
    {"Drain", "SetLogLevel", "ImportAccounts", "ExportAccounts", "SetSchedule", "DeleteBucket"}
)

_TEXTS = (
    *(BUCKET, BUCKET, "k", "k", "model/1@2", "", "a" * 1025, "\0", "../../etc/passwd", "/"),
    *("\u00e9\u65e5\U0001f511", "a//b", "root", "nobody", "us-east-1", "null", "*", "info"),
)
_INTEGERS = (
    0,
    0,
    1,
    1,
    2,
    10,
    1000,
    4096,
    65_536,
    2**31,
    2**32,
    2**63 - 1,
    2**64 - 1,
    -1,
    -(2**63),
)
_FLOATS = (0.0, 0.5, 1.0, -1.0, 1e308, 5e-324, float("inf"), float("-inf"), float("nan"))
_BYTES = (b"", b"0" * 16, b"\xff" * 32, b"k" * 1000)


def sample(rng: random.Random, kind: inspect.Type, depth: int = 0) -> Any:
    """A value that msgpack can hold and that has the form of `kind`."""
    match kind:
        case inspect.StructType() | inspect.Metadata():
            return _struct(rng, kind, depth)
        case inspect.UnionType():
            return sample(rng, rng.choice(kind.types), depth)
        case inspect.VarTupleType() | inspect.ListType():
            count = rng.choice((0, 1, 1, 2, 3)) if depth < 4 else 0
            return [sample(rng, kind.item_type, depth + 1) for _ in range(count)]
        case inspect.TupleType():
            return [sample(rng, item, depth + 1) for item in kind.item_types]
        case inspect.DictType():
            return {
                sample(rng, kind.key_type): sample(rng, kind.value_type, depth + 1)
                for _ in range(rng.choice((0, 1, 2)))
            }
        case inspect.EnumType():
            return rng.choice([member.value for member in kind.cls])
        case inspect.BoolType():
            return rng.random() < 0.5
        case inspect.IntType():
            return rng.choice(_INTEGERS)
        case inspect.FloatType():
            return rng.choice(_FLOATS)
        case inspect.BytesType():
            return rng.choice(_BYTES)
        case inspect.StrType():
            return rng.choice(_TEXTS)
        case _:
            return None


def _struct(rng: random.Random, kind: Any, depth: int) -> dict[str, Any]:
    fields: dict[str, Any] = {kind.tag_field: kind.tag} if kind.tag_field else {}
    for field in kind.fields:
        if field.required or rng.random() < 0.6:
            fields[field.encode_name] = sample(rng, field.type, depth + 1)
    return fields


def _kinds(union: Any) -> tuple[inspect.Type, ...]:
    return tuple(
        inspect.type_info(kind) for kind in get_args(union) if kind.__name__ not in _LEFT_OUT
    )


GATEWAY_KINDS = (*_kinds(GatewayRequest), *_kinds(PutEnd))
TARGET_KINDS = _kinds(TargetRequest)
REPLY_KINDS = _kinds(StorageReply)


def encoded(message: Any) -> bytes:
    """A frame that holds the message."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def frames(kinds: tuple[inspect.Type, ...], count: int) -> tuple[bytes, ...]:
    """The same `count` frames in every run, all kinds among them."""
    rng = random.Random(0)
    return tuple(encoded(sample(rng, kinds[number % len(kinds)])) for number in range(count))
