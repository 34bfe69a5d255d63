"""Reads answers of a later release: what it added to them is passed over.

Messages refuse fields that they do not know, so that nothing a request asks for is left undone. An
answer asks for nothing: its reader takes what it knows. So servers that are replaced one after the
other, and then gateways, clients and operators' programs, understand each other. What grants access
is the exception: a later field may narrow it, so a reader that does not know the field refuses it.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import inspect

T = TypeVar("T")


class AnswerDecoder(Generic[T]):
    """As a decoder of msgspec's, for a type or a union of tagged ones. Whatever makes sense to this
    release is decoded at once; fields are left out only where it does not.
    """

    def __init__(
        self, kind: Any, form: ModuleType = msgspec.msgpack, strict: tuple[type, ...] = ()
    ) -> None:
        """`form` is `msgspec.msgpack` or `msgspec.json`; no field is left out in structs of the
        classes in `strict`, and below them.
        """
        self._form = form
        self._kind = kind
        self._strict = strict
        self._decoder = form.Decoder(kind)

    def decode(self, data: bytes | bytearray | memoryview) -> T:
        """Raises `msgspec.MsgspecError` for what is no such answer, later fields aside."""
        try:
            decoded: T = self._decoder.decode(data)
        except msgspec.ValidationError:
            known = _known(self._form.decode(data), inspect.type_info(self._kind), self._strict)
            decoded = self._decoder.decode(self._form.encode(known))
        return decoded

    def decode_known(self, data: bytes | bytearray | memoryview) -> T | None:
        """As `decode`; None for a message of a kind that a later release has added."""
        try:
            return self.decode(data)
        except msgspec.ValidationError:
            value = self._form.decode(data)
            if not isinstance(value, dict) or not isinstance(value.get("op"), str):
                raise
            if _struct_for(value, inspect.type_info(self._kind)) is None:
                return None
            raise

    def __repr__(self) -> str:
        return f"<AnswerDecoder of {self._kind}>"


def _known(value: Any, kind: inspect.Type, strict: tuple[type, ...]) -> Any:
    """The value without fields of structs that their class does not have."""
    if isinstance(value, dict):
        struct = _struct_for(value, kind)
        if struct is not None and struct.cls in strict:
            return value
        if struct is not None:
            fields: dict[Any, inspect.Type] = {one.encode_name: one.type for one in struct.fields}
            names = {struct.tag_field, *fields}
            return {
                name: _known(one, fields.get(name, inspect.AnyType()), strict)
                for name, one in value.items()
                if name in names
            }
        mapping = _one_of(kind, inspect.DictType)
        if mapping is not None:
            return {name: _known(one, mapping.value_type, strict) for name, one in value.items()}
    if isinstance(value, list):
        sequence = _one_of(kind, (inspect.ListType, inspect.VarTupleType))
        if sequence is not None:
            return [_known(one, sequence.item_type, strict) for one in value]
        row = _one_of(kind, inspect.StructType)
        if row is not None:
            return [
                _known(one, at.type, strict) for one, at in zip(value, row.fields, strict=False)
            ]
    return value


def _struct_for(value: dict[Any, Any], kind: inspect.Type) -> inspect.StructType | None:
    """The class that a map is of."""
    structs = [one for one in _kinds(kind) if isinstance(one, inspect.StructType)]
    for one in structs:
        if one.tag_field is not None and value.get(one.tag_field) == one.tag:
            return one
    return structs[0] if len(structs) == 1 and structs[0].tag_field is None else None


def _one_of(kind: inspect.Type, wanted: Any) -> Any:
    return next((one for one in _kinds(kind) if isinstance(one, wanted)), None)


def _kinds(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)
