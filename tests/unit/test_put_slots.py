"""Who may have how many puts unfinished."""

from __future__ import annotations

import pytest

from objectcache_schemas.errors import Busy, InvalidRequest
from objectcache_schemas.settings import StorageSettings
from objectcache_storage_server.put_slots import PutSlots


def slots(puts_max: int = 4, bytes_max: int = 1000, share: float = 0.5) -> PutSlots:
    return PutSlots(
        StorageSettings(
            puts_max=puts_max, put_staging_bytes_max=bytes_max, tenant_put_share_max=share
        )
    )


def test_a_tenant_with_its_share_of_the_puts_leaves_the_rest_to_others() -> None:
    of_all = slots()
    of_all.take(1, "slow")
    of_all.take(1, "slow")
    with pytest.raises(Busy, match=r"'slow' has 2 .* storage\.tenant_put_share_max .* 2 puts"):
        of_all.take(1, "slow")
    of_all.take(1, "other")
    of_all.give_back(1, "slow")
    of_all.take(1, "slow")
    of_all.take(1, "third")
    with pytest.raises(Busy, match=r"storage\.puts_max"):
        of_all.take(1, "fourth")
    assert (of_all.puts, of_all.staged_bytes) == (4, 4)


def test_a_tenant_with_its_share_of_the_bytes_leaves_the_rest_to_others() -> None:
    of_all = slots()
    of_all.take(400, "slow")
    with pytest.raises(Busy, match=r"storage\.tenant_put_share_max .* 500 bytes"):
        of_all.take(101, "slow")
    of_all.take(100, "slow")
    of_all.take(500, "other")
    with pytest.raises(Busy, match=r"storage\.put_staging_bytes_max"):
        of_all.take(1, "third")


@pytest.mark.parametrize(("puts_max", "share"), [(1, 0.5), (100, 0.001)])
def test_a_tenant_with_no_put_may_begin_one_of_any_size(puts_max: int, share: float) -> None:
    of_all = slots(puts_max, share=share)
    of_all.take(1000, "one")
    with pytest.raises(Busy):
        of_all.take(0, "one")
    of_all.give_back(1000, "one")
    of_all.take(1000, "one")


def test_a_share_of_the_whole_is_no_share() -> None:
    of_all = slots(share=1.0)
    for _ in range(4):
        of_all.take(250, "one")
    with pytest.raises(Busy, match=r"storage\.puts_max"):
        of_all.take(0, "one")


def test_a_refused_put_takes_nothing() -> None:
    of_all = slots()
    with pytest.raises(InvalidRequest) as caught:
        of_all.take(1001, "one")
    assert caught.value.code == "EntityTooLarge"
    of_all.take(500, "one")
    with pytest.raises(Busy):
        of_all.take(1, "one")
    of_all.give_back(500, "one")
    assert (of_all.puts, of_all.staged_bytes) == (0, 0)
    assert repr(of_all) == "<PutSlots 0 puts of 0 tenants>"
