"""Who may have how many puts unfinished."""

from __future__ import annotations

import pytest

from objectcache_runtime.settings import StorageSettings
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import GIB, KIB, MIB
from objectcache_storage_server.admission.put_slots import PutSlots


def slots(puts_max: int = 4, bytes_max: int = 1000) -> PutSlots:
    return PutSlots(StorageSettings(puts_max=puts_max, put_staging_bytes_max=bytes_max))


def test_a_tenant_with_its_share_of_the_puts_leaves_the_rest_to_others() -> None:
    of_all = slots()
    for _ in range(3):
        assert of_all.take("slow", 1) == 1
    assert of_all.take("slow", 1) is None
    assert of_all.take("other", 1) == 1
    assert of_all.take("third", 1) is None
    of_all.give_back("slow", 1)
    assert of_all.take("third", 0) == 0
    assert (of_all.puts, of_all.staged_bytes) == (4, 3)
    assert of_all.shortage("slow") == (
        "4 puts are running, storage.puts_max is 4; they hold 3 bytes, "
        "storage.put_staging_bytes_max is 1000; 2 of them, of 2 bytes, are of 'slow'"
    )


def test_a_tenant_with_its_share_of_the_bytes_leaves_the_rest_to_others() -> None:
    of_all = slots(puts_max=64)
    assert of_all.take("slow", 700) == 700
    assert of_all.take("slow", 100) is None
    assert of_all.take("other", 300) is None
    assert of_all.take("other", 175) == 175
    assert of_all.take("third", 16) is None
    assert of_all.take("third", 15) == 15
    assert of_all.held("slow") == 0.7


@pytest.mark.parametrize("puts_max", [1, 100])
def test_a_tenant_with_no_put_may_begin_one_of_three_quarters(puts_max: int) -> None:
    of_all = slots(puts_max)
    assert of_all.take("one", 750) == 750
    assert of_all.take("one", 1) is None
    of_all.give_back("one", 750)
    assert of_all.take("one", 750) == 750


def test_puts_that_declare_all_they_can_leave_every_slot_its_little_put() -> None:
    of_all = PutSlots(StorageSettings())
    for number in range(64):
        sizes = (64 * GIB, 24 * GIB, 5 * GIB, GIB, 100 * MIB, 48 * MIB)
        next((size for size in sizes if of_all.take(f"greedy-{number}", size)), None)
    assert of_all.puts == 64
    for number in range(64):
        assert of_all.take(f"small-{number}", 48 * MIB) == 48 * MIB


def test_two_tenants_with_a_put_each_leave_room_for_a_large_one_of_a_third() -> None:
    of_all = PutSlots(StorageSettings())
    assert of_all.take("one", 64 * GIB)
    assert of_all.take("two", 24 * GIB) is None
    assert of_all.take("two", 20 * GIB)
    assert of_all.take("third", GIB)
    assert of_all.take("fourth", 4 * KIB)


def test_a_wish_for_much_is_granted_whatever_passed_it_freely() -> None:
    """Little puts in every slot but one leave what the largest put takes."""
    of_all = PutSlots(StorageSettings())
    for number in range(127):
        assert of_all.passes_freely(f"small-{number}", 48 * MIB)
        assert of_all.take(f"small-{number}", 48 * MIB)
    assert not of_all.passes_freely("small-0", 1)
    assert of_all.take("large", of_all.put_bytes_max) == of_all.put_bytes_max


def test_what_could_never_be_let_in_is_too_large() -> None:
    of_all = slots()
    with pytest.raises(InvalidRequest, match=r"storage\.put_staging_bytes_max") as caught:
        of_all.check(751)
    assert caught.value.code == "EntityTooLarge"
    of_all.check(750)
    assert repr(of_all) == "<PutSlots 0 puts of 0 tenants>"
