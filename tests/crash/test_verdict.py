"""What the judge of a store's history finds, and what it lets pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.journal import Began, Ended, Journal, Ran, read_journal
from tests.crash.verdict import Name, Promises, problems
from tests.crash.workload import CHUNK_ETAG, Delete, Operation, Put, PutPrefix, Value

OLD, ONE, TWO = Value("old", 1), Value("one", 10), Value("two", 20)
CHUNK = Value(CHUNK_ETAG, 8)
A, B = ("plain", "a"), ("plain", "b")
STRICT = Promises()


def put(**values: Value) -> Put:
    return Put("plain", values)


def chunks(*positions: int) -> PutPrefix:
    values = {f"chain 4 0/{position:04}": CHUNK for position in positions}
    return PutPrefix("plain", values, 2, 4, layerwise=False, parent_key=None, pieces=1)


def acknowledged(operation: Operation, began: int, ended: int) -> Ran:
    return Ran(operation, began, ended, is_acknowledged=True)


def unfinished(operation: Operation, began: int, ended: int = 100) -> Ran:
    return Ran(operation, began, ended, is_acknowledged=False)


DELETE_A = Delete("plain", ["a"])
BOTH = put(a=ONE, b=ONE)


@pytest.mark.parametrize(
    ("ran", "possible", "impossible"),
    [
        ([], [{A: OLD}], [{}, {A: ONE}, {A: OLD, B: OLD}]),
        ([acknowledged(put(a=ONE), 0, 1)], [{A: ONE}], [{A: OLD}, {}]),
        ([unfinished(put(a=ONE), 0)], [{A: ONE}, {A: OLD}], [{}, {A: TWO}]),
        (
            [acknowledged(put(a=ONE), 0, 1), acknowledged(put(a=TWO), 2, 3)],
            [{A: TWO}],
            [{A: ONE}, {A: OLD}],
        ),
        (  # at once, so either may be the later one
            [acknowledged(put(a=ONE), 0, 2), acknowledged(put(a=TWO), 1, 3)],
            [{A: ONE}, {A: TWO}],
            [{A: OLD}, {}],
        ),
        ([acknowledged(DELETE_A, 0, 1)], [{}], [{A: OLD}]),
        ([unfinished(DELETE_A, 0)], [{}, {A: OLD}], [{A: ONE}]),
        (
            [unfinished(DELETE_A, 0, 5), acknowledged(put(a=ONE), 6, 7)],
            [{A: ONE}],
            [{}, {A: OLD}],
        ),
        (  # all or nothing
            [unfinished(BOTH, 0)],
            [{A: ONE, B: ONE}, {A: OLD}],
            [{A: ONE}, {A: OLD, B: ONE}, {B: ONE}],
        ),
        (  # somebody else was at a, so that it tells nothing
            [unfinished(BOTH, 0), unfinished(put(a=TWO), 1)],
            [{A: TWO, B: ONE}, {A: OLD, B: ONE}, {A: TWO}],
            [{}],
        ),
    ],
)
def test_only_what_can_have_happened_passes(
    ran: list[Ran], possible: list[dict[Name, Value]], impossible: list[dict[Name, Value]]
) -> None:
    for found in possible:
        assert problems({A: OLD}, ran, found, STRICT) == []
    for found in impossible:
        assert problems({A: OLD}, ran, found, STRICT)


def test_evicted_chunks_are_missing_from_the_end_only() -> None:
    ran = [acknowledged(chunks(0, 1, 2), 0, 1)]
    keys = [("plain", f"chain 4 0/{position:04}") for position in range(3)]
    evicts = Promises(evicts=True)
    for count in range(4):
        assert problems({}, ran, dict.fromkeys(keys[:count], CHUNK), evicts) == []
    assert problems({}, ran, dict.fromkeys(keys[1:], CHUNK), evicts)
    assert problems({}, ran, dict.fromkeys(keys[:2], CHUNK), STRICT)


def test_a_bucket_that_may_lose_what_is_recent_keeps_what_nobody_touched() -> None:
    ran = [acknowledged(put(a=ONE), 0, 1)]
    lossy = Promises(lossy_buckets=frozenset(["plain"]))
    for found in (None, OLD, ONE):
        state = {A: found} if found else {}
        assert problems({A: OLD, B: OLD}, ran, state | {B: OLD}, lossy) == []
    assert problems({A: OLD, B: OLD}, ran, {A: TWO, B: OLD}, lossy)
    assert problems({A: OLD, B: OLD}, ran, {A: ONE}, lossy)


def test_a_line_that_a_kill_has_torn_says_nothing(tmp_path: Path) -> None:
    file = tmp_path / "journal"
    journal = Journal(file)
    journal.write(Began(0, DELETE_A))
    journal.write(Ended(0, ""))
    whole = file.read_bytes()
    assert read_journal(file, 0).ran == [acknowledged(DELETE_A, 0, 1)]
    begun = whole.index(b"\n") + 1
    for length in range(begun + 1, len(whole)):
        file.write_bytes(whole[:length])
        assert read_journal(file, 0).ran == [unfinished(DELETE_A, 0, 1)]
    journal.close()
