"""Whether what is found in a store can have come from what was done to it. Pure.

An operation happened at one moment between its begin and its acknowledgement, or, if the process
was killed before that, at one moment before its end, or never. So a value may be found where no
acknowledged operation on its key lies wholly behind the one that wrote it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tests.crash.journal import Ran
from tests.crash.workload import Delete, Put, PutPrefix, Value, is_chunk, parent_of

Name = tuple[str, str]  # bucket and key
State = Mapping[Name, Value]
BEFORE = -1  # the tick of what was there at first


@dataclass(frozen=True, slots=True)
class Promises:
    """What a store does not promise."""

    evicts: bool = False  # chunks may go, from the ends of their chains
    lossy_buckets: frozenset[str] = field(default_factory=frozenset)  # may lose what is recent


@dataclass(frozen=True, slots=True)
class _Effect:
    """What one operation does to one key; None deletes it."""

    ran: Ran | None  # None: it was there at first
    value: Value | None

    @property
    def ended(self) -> int:
        return BEFORE if self.ran is None else self.ran.ended

    def lies_behind(self, other: _Effect) -> bool:
        """Whether it certainly happened, and after the other one."""
        return self.ran is not None and self.ran.is_acknowledged and self.ran.began > other.ended


def problems(before: State, ran: Sequence[Ran], found: State, promises: Promises) -> list[str]:
    """What cannot be, in words; empty where all is well."""
    effects = _effects(before, ran)
    said: list[str] = []
    for name in sorted(effects.keys() | found.keys()):
        allowed = _allowed(name, effects.get(name, []), promises)
        if found.get(name) not in allowed:
            said.append(f"{name} is {found.get(name)}, possible are {sorted(map(str, allowed))}")
    for each in ran:
        said += _torn_batch(each, effects, found, promises)
    if promises.evicts:
        said += _orphans(found)
    return said


def _effects(before: State, ran: Sequence[Ran]) -> dict[Name, list[_Effect]]:
    effects: defaultdict[Name, list[_Effect]] = defaultdict(list)
    for each in ran:
        for name, value in _written(each):
            effects[name].append(_Effect(each, value))
    for name in effects.keys() | before.keys():
        effects[name].append(_Effect(None, before.get(name)))
    return effects


def _written(ran: Ran) -> Iterator[tuple[Name, Value | None]]:
    operation = ran.operation
    match operation:
        case Put() | PutPrefix():
            yield from (((operation.bucket, key), value) for key, value in operation.values.items())
        case Delete():
            yield from (((operation.bucket, key), None) for key in operation.keys)
        case _:
            pass


def _allowed(name: Name, effects: Sequence[_Effect], promises: Promises) -> set[Value | None]:
    bucket, key = name
    was_touched = len(effects) > 1
    if bucket in promises.lossy_buckets and was_touched:
        return {effect.value for effect in effects} | {None}
    allowed = {
        effect.value
        for effect in effects
        if not any(other.lies_behind(effect) for other in effects)
    }
    if not effects or (promises.evicts and is_chunk(key)):
        allowed.add(None)
    return allowed


def _torn_batch(
    ran: Ran, effects: Mapping[Name, Sequence[_Effect]], found: State, promises: Promises
) -> Iterator[str]:
    """A put that was not acknowledged is there wholly or not at all.

    Only keys tell that nobody else was at, and that held something else before.
    """
    operation = ran.operation
    if ran.is_acknowledged or not isinstance(operation, Put | PutPrefix):
        return
    if operation.bucket in promises.lossy_buckets:
        return
    if promises.evicts and isinstance(operation, PutPrefix):
        return
    telling = {
        key: found.get((operation.bucket, key)) == value
        for key, value in operation.values.items()
        if _tells(ran, value, effects[operation.bucket, key])
    }
    if len(set(telling.values())) > 1:
        there = sorted(key for key, is_there in telling.items() if is_there)
        yield f"of an unfinished {type(operation).__name__} of {sorted(telling)} there are {there}"


def _tells(ran: Ran, value: Value, effects: Sequence[_Effect]) -> bool:
    others = [effect for effect in effects if effect.ran is not ran]
    return all(
        effect.value != value
        and effect.ended < ran.began
        and (effect.ran is None or effect.ran.is_acknowledged)
        for effect in others
    )


def _orphans(found: State) -> Iterator[str]:
    for bucket, key in found:
        parent = parent_of(key)
        if parent is not None and (bucket, parent) not in found:
            yield f"{key!r} is there, and {parent!r} before it is not"
