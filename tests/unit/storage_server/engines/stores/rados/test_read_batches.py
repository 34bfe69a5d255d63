"""Which operations a batch of reads becomes."""

from __future__ import annotations

from objectcache_storage_server.engines.stores.rados.read_batches import RANGES_MAX, operations
from objectcache_storage_server.engines.stores.shared_store import ObjectRead


def sizes(reads: list[ObjectRead]) -> list[tuple[str, list[tuple[int, int]]]]:
    """Offset and bytes of the ranges of each operation."""
    return [
        (name, [(each.offset_bytes, each.size_bytes) for each in ranges])
        for name, ranges in operations(reads)
    ]


def test_reads_of_an_object_are_one_operation() -> None:
    memory = memoryview(bytearray(100))
    reads = [
        ObjectRead("b", 0, memory[0:10]),
        ObjectRead("a", 50, memory[20:30]),
        ObjectRead("b", 90, memory[40:45]),
    ]
    assert sizes(reads) == [("b", [(0, 10), (90, 5)]), ("a", [(50, 10)])]


def test_what_follows_in_the_object_and_in_memory_is_one_range() -> None:
    memory = memoryview(bytearray(100))
    together = [ObjectRead("a", 10 * i, memory[10 * i : 10 * (i + 1)]) for i in range(4)]
    apart_in_memory = [ObjectRead("b", 10 * i, memory[20 * i :][:10]) for i in range(3)]
    apart_in_the_object = [ObjectRead("c", 20 * i, memory[10 * i :][:10]) for i in range(3)]
    assert sizes([*together, *apart_in_memory, *apart_in_the_object]) == [
        ("a", [(0, 40)]),
        ("b", [(0, 10), (10, 10), (20, 10)]),
        ("c", [(0, 10), (20, 10), (40, 10)]),
    ]


def test_nothing_is_asked_for_an_empty_landing() -> None:
    memory = memoryview(bytearray(10))
    assert sizes([ObjectRead("a", 3, memory[:0]), ObjectRead("b", 0, memory)]) == [("b", [(0, 10)])]


def test_an_operation_has_so_many_ranges_and_no_more() -> None:
    memory = memoryview(bytearray(1))
    reads = [ObjectRead("a", i, memory) for i in range(RANGES_MAX + 1)]
    assert [len(ranges) for _, ranges in operations(reads)] == [RANGES_MAX, 1]
