"""What each setting allows, in words from its declaration, and the error for what it does not."""

from __future__ import annotations

import contextlib
import difflib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin

import msgspec

from objectcache_runtime.amounts import parse_size_bytes
from objectcache_runtime.networking.listening import HostPort, address_form, either
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.excerpt import excerpt
from objectcache_schemas.limits import GIB, KIB, MIB

FORM = "form"  # under which a declaration carries its `Form`
NAMES_SHOWN_MAX = 3
GBPS = "Gbps (10^9 bits a second)"
NEARNESS_MIN = 0.8  # of difflib, 1 is the same text
# By the end of a setting's name: what its number counts. The first that fits holds.
_UNITS = (
    ("bytes_per_s", "bytes a second"),
    ("bytes_per_s_min", "bytes a second"),
    ("_per_s", ""),
    ("bytes", "bytes"),
    ("bytes_max", "bytes"),
    ("_gbps", GBPS),
    ("_s", "seconds"),
)


@dataclass(frozen=True, slots=True)
class Form:
    """What a value must be: in words, and by a check that raises `InvalidRequest`.

    `check` is given the setting's name and the value in its type; without one msgspec checks.
    """

    words: str
    check: Callable[[str, Any], object] | None = None


def one_of(*names: str) -> msgspec.Meta:
    """The declaration of a setting that is one of these names."""
    pattern = rf"^({'|'.join(re.escape(name) for name in names)})\Z"
    return msgspec.Meta(pattern=pattern, extra={FORM: Form(either(names))})


def text_like(pattern: str, words: str) -> msgspec.Meta:
    """The declaration of a setting with this pattern; `words` say it to whom gave another text."""
    return msgspec.Meta(pattern=pattern, extra={FORM: Form(words)})


def either_zero_or(least: float, most: float, unit: str = GBPS) -> msgspec.Meta:
    """The declaration of a rate, in Gbps by default, that is 0, for none, or within bounds."""
    words = f"0 for none, or a number of {unit} from {least:g} to {most:g}"

    def check(name: str, value: float) -> None:
        if 0 < value < least:
            raise InvalidRequest(f"{name} must be {words}, got {value:g}")

    return msgspec.Meta(ge=0, le=most, extra={FORM: Form(words, check)})


def numbers(what: str, most: int) -> msgspec.Meta:
    """The declaration of a list of numbers, of what there are no more than one for each number up
    to `most`.
    """
    words = f"numbers of {what}, 0 to {most}, with commas between them"

    def check(name: str, values: tuple[str, ...]) -> None:
        for value in values:
            if not (value.isascii() and value.isdigit()) or int(value) > most:
                raise InvalidRequest(f"{name} must be {words}, got {excerpt(repr(value))}")

    return msgspec.Meta(extra={FORM: Form(words, check)})


def address(*other_words: str) -> msgspec.Meta:
    """The declaration of an address, host:port, or one of a few words in its place; "" is none."""

    def check(name: str, text: str) -> None:
        if text not in other_words:
            HostPort.parse(name, text, other_words)

    return msgspec.Meta(extra={FORM: Form(address_form(other_words), check)})


def checked_value(name: str, annotation: object, value: object, source: str) -> object:
    """The value in the type of the setting `name`, read from text where it has to be.

    Raises `InvalidRequest` that says the setting, what it allows, the value, and its source.
    """
    form = _form(annotation)
    try:
        converted: object = msgspec.convert(
            _in_bytes(name, annotation, value), annotation, strict=False
        )
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise _refused(name, annotation, value, source) from error
    if isinstance(converted, float) and not math.isfinite(converted):
        raise _refused(name, annotation, value, f"{source}: infinity is not a number here")
    if form is not None and form.check is not None:
        try:
            form.check(name, converted)
        except InvalidRequest as error:
            raise InvalidRequest(f"{error.message}; it stands {source}") from error
    return converted


def _in_bytes(name: str, annotation: object, value: object) -> object:
    """The bytes of a text with a unit, where that is a setting's; any other value as it is."""
    if isinstance(value, str) and not value.isdigit() and _takes_unit(name, annotation):
        with contextlib.suppress(InvalidRequest):
            return parse_size_bytes(value)
    return value


def _takes_unit(name: str, annotation: object) -> bool:
    return _unit(name) == "bytes" and _parts(annotation)[0] is int


def _refused(name: str, annotation: object, value: object, source: str) -> InvalidRequest:
    shown = excerpt(repr(value))
    if _takes_unit(name, annotation):
        source += "; a unit may follow the number, as in 64MiB"
    return InvalidRequest(f"{name} must be {allowed(name, annotation)}, got {shown}, {source}")


def likely_names(name: str, known: Sequence[str]) -> str:
    """For an error, which settings may be meant by the name of none; else nothing."""
    key = name.rpartition(".")[2]
    elsewhere = [other for other in known if other.partition(".")[2] == key]
    near = difflib.get_close_matches(name, known, n=NAMES_SHOWN_MAX, cutoff=NEARNESS_MIN)
    likely = list(dict.fromkeys(near + elsewhere))[:NAMES_SHOWN_MAX]
    return f"; is {either(likely)} meant?" if likely else ""


def allowed(name: str, annotation: object) -> str:
    """What the setting `name` may be, as in "NAME must be ..."."""
    form = _form(annotation)
    if form is not None:
        return form.words
    kind, metas = _parts(annotation)
    if kind is bool:
        return "true or false"
    if kind is int or kind is float:
        return _number(name, "a whole number" if kind is int else "a number", metas)
    return "a text" if kind is str else "a list of texts"


def _number(name: str, kind: str, metas: list[msgspec.Meta]) -> str:
    unit = _unit(name)
    words = f"{kind} of {unit}" if unit else kind
    for meta in metas:
        words += _bounds(meta, is_bytes=unit.startswith("bytes"))
        if meta.multiple_of is not None:
            words += f", a multiple of {_shown(meta.multiple_of, unit.startswith('bytes'))}"
    return words


def _unit(name: str) -> str:
    """What a setting's number counts, empty where its name does not say."""
    return next((unit for ending, unit in _UNITS if name.endswith(ending)), "")


def _bounds(meta: msgspec.Meta, *, is_bytes: bool) -> str:
    least = None if meta.ge is None else _shown(meta.ge, is_bytes)
    most = None if meta.le is None else _shown(meta.le, is_bytes)
    if least is not None and most is not None:
        return f" from {least} to {most}"
    above = None if meta.gt is None else f" above {_shown(meta.gt, is_bytes)}"
    if above is not None:
        return above if most is None else f"{above} and at most {most}"
    return "" if least is None else f" of at least {least}"


def _shown(number: float, is_bytes: bool) -> str:
    if not is_bytes or number < KIB:
        return f"{number:g}" if isinstance(number, float) else str(number)
    return f"{int(number)}{in_binary_unit(int(number))}"


def in_binary_unit(count_bytes: int) -> str:
    """ " (64 MiB)" for a count of bytes that is whole in such a unit, else nothing."""
    for unit_bytes, unit in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count_bytes >= unit_bytes and count_bytes % unit_bytes == 0:
            return f" ({count_bytes // unit_bytes} {unit})"
    return ""


def _form(annotation: object) -> Form | None:
    form = declared(annotation, FORM)
    return form if isinstance(form, Form) else None


def declared(annotation: object, key: str) -> object:
    """What a declaration carries under `key` beside what msgspec reads; None for nothing."""
    extras = (meta.extra or {} for meta in _parts(annotation)[1])
    return next((extra[key] for extra in extras if key in extra), None)


def _parts(annotation: object) -> tuple[Any, list[msgspec.Meta]]:
    """The bare type, and what was declared about it."""
    if get_origin(annotation) is not Annotated:
        return annotation, []
    bare, *extras = get_args(annotation)
    kind, metas = _parts(bare)
    return kind, metas + [extra for extra in extras if isinstance(extra, msgspec.Meta)]
