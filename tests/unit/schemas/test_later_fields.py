"""Answers of a later release, which has added a field to everything, are read as this release's."""

from __future__ import annotations

from types import ModuleType
from typing import Any, get_args

import msgspec
import pytest
from msgspec import inspect

from objectcache_gateway.admin.api import ROUTES
from objectcache_gateway.storage.storage_connection import REPLY
from objectcache_schemas.conversations import GatewayRequest, StorageReply
from objectcache_schemas.errors import Unavailable
from objectcache_schemas.messages.buckets import DeleteBucket
from objectcache_schemas.messages.later_fields import AnswerDecoder
from objectcache_schemas.messages.sessions import LayersReady, TargetEvent
from objectcache_schemas.operators.account_changes import Directory

LATER = "a_later_field"


def sample(kind: inspect.Type, *, later: bool) -> Any:
    """A value of this type with all its fields, and with one more in every struct where `later`."""
    match kind:
        case inspect.StructType(array_like=True):
            return [sample(one.type, later=later) for one in kind.fields] + [7] * later
        case inspect.StructType():
            fields = {one.encode_name: sample(one.type, later=later) for one in kind.fields}
            tag = {kind.tag_field: kind.tag} if kind.tag_field is not None else {}
            return tag | fields | ({LATER: {"of": [1]}} if later else {})
        case inspect.UnionType():
            given = [one for one in kind.types if not isinstance(one, inspect.NoneType)]
            return sample(given[0], later=later)
        case inspect.ListType() | inspect.VarTupleType() | inspect.SetType():
            return [sample(kind.item_type, later=later)]
        case inspect.TupleType():
            return [sample(one, later=later) for one in kind.item_types]
        case inspect.DictType():
            return {"key": sample(kind.value_type, later=later)}
        case inspect.EnumType():
            return next(iter(kind.cls)).value
        case inspect.LiteralType():
            return kind.values[0]
        case inspect.StrType():
            return "text-of-10"
        case inspect.BytesType():
            return b"bytes"
        case inspect.BoolType():
            return True
        case inspect.IntType():
            return 1
        case inspect.FloatType():
            return 1.0
        case _:
            return None


@pytest.mark.parametrize(
    ("union", "kind"),
    [
        *((StorageReply, kind) for kind in get_args(StorageReply)),
        *((TargetEvent, kind) for kind in get_args(TargetEvent)),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_every_answer_and_event_of_a_later_release_is_read(union: Any, kind: Any) -> None:
    check_read(union, inspect.type_info(kind), msgspec.msgpack)


@pytest.mark.parametrize(
    "kind",
    sorted({one.reply for one in ROUTES if one.reply is not None}, key=str),
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_every_answer_of_a_later_admin_api_is_read(kind: Any) -> None:
    check_read(kind, inspect.type_info(kind), msgspec.json)


def check_read(decoded_as: Any, kind: inspect.Type, form: ModuleType) -> None:
    own = form.encode(sample(kind, later=False))
    strict = form.Decoder(decoded_as)
    expected = strict.decode(own)
    later = form.encode(sample(kind, later=True))
    with pytest.raises(msgspec.ValidationError):
        strict.decode(later)
    decoder: AnswerDecoder[Any] = AnswerDecoder(decoded_as, form)
    assert decoder.decode(later) == decoder.decode(own) == expected


@pytest.mark.parametrize("kind", get_args(GatewayRequest), ids=lambda one: one.__name__)
def test_a_request_of_a_later_release_is_refused(kind: Any) -> None:
    later = msgspec.msgpack.encode(sample(inspect.type_info(kind), later=True))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.Decoder(GatewayRequest).decode(later)


@pytest.mark.parametrize("named", ["users", "keys", "tokens"])
def test_what_a_later_release_says_of_an_account_is_not_passed_over(named: str) -> None:
    kind = inspect.type_info(Directory)
    told = sample(kind, later=False)
    expected = msgspec.msgpack.Decoder(StorageReply).decode(msgspec.msgpack.encode(told))
    assert REPLY.decode(msgspec.msgpack.encode(told | {LATER: 1})) == expected
    narrowed = told | {named: [told[named][0] | {LATER: 1}]}
    with pytest.raises(msgspec.ValidationError, match=LATER):
        REPLY.decode(msgspec.msgpack.encode(narrowed))
    quota = told["users"][0]["quota"] | {LATER: 1}
    limited = told | {"users": [told["users"][0] | {"quota": quota}]}
    with pytest.raises(msgspec.ValidationError, match=LATER):
        REPLY.decode(msgspec.msgpack.encode(limited))


def test_what_is_no_answer_is_refused_as_before() -> None:
    decoder: AnswerDecoder[Any] = AnswerDecoder(StorageReply)
    for wrong in ({"op": "Stored"}, {"op": "error", "code": 1, "message": "", LATER: 1}, {}, 7):
        with pytest.raises(msgspec.ValidationError):
            decoder.decode(msgspec.msgpack.encode(wrong))
    with pytest.raises(msgspec.DecodeError):
        decoder.decode(b"\x81")
    with pytest.raises(msgspec.ValidationError):
        decoder.decode(msgspec.msgpack.encode(DeleteBucket(name="a")))


def test_an_event_of_a_kind_that_a_later_release_has_added_is_told_from_nonsense() -> None:
    decoder: AnswerDecoder[Any] = AnswerDecoder(TargetEvent)
    ready = LayersReady(tag=1, end_layer=2)
    assert decoder.decode_known(msgspec.msgpack.encode(ready)) == ready
    assert decoder.decode_known(msgspec.msgpack.encode({"op": "Later", "x": 1})) is None
    for wrong in ({"op": "LayersReady", "tag": "a"}, {"op": 7}, [1]):
        with pytest.raises(msgspec.ValidationError):
            decoder.decode_known(msgspec.msgpack.encode(wrong))
    error = Unavailable("gone").to_wire()
    assert decoder.decode_known(msgspec.msgpack.encode(error)) == error
