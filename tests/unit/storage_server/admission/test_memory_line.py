"""Waiting for memory: each tenant for its share, and whoever leaves leaves nothing behind."""

from __future__ import annotations

import asyncio
import itertools
import math
from typing import Any

import pytest

from objectcache_fabrics.staging_memory import StagingMemory
from objectcache_runtime.buffers import BufferPool, ReservedMemory
from objectcache_runtime.networking.stream_socket import ConnectionEnded
from objectcache_runtime.settings import SchedulerSettings, ServerSettings, Settings
from objectcache_schemas.errors import Busy, Unavailable
from objectcache_schemas.limits import KIB, MIB
from objectcache_schemas.messages.frames import encode_frame
from objectcache_schemas.messages.reads import ObjectOpened, OpenObject, SendBody
from objectcache_storage_server.admission.entrance import Gone
from objectcache_storage_server.admission.holders import get_holder
from objectcache_storage_server.admission.memory_line import MemoryLine, MemoryWish, SharedMemory
from objectcache_storage_server.conversations.conversation import Conversation
from objectcache_storage_server.engines.memory.engine import MemoryEngine
from objectcache_storage_server.s3.object_gets import serve_object
from objectcache_storage_server.service import Service
from tests.contract.engine_suite import put
from tests.unit.storage_server.test_service import BUCKET, DEADLINE_S, hosted

CAPACITY_BYTES = 100
LONG_S = 1000.0
ROUNDS_UNTIL_THROUGH = 12  # of the loop, from a grant until its task has it; fewer suffice
CONTENT = bytes(range(256)) * (8 * MIB // 256)


def a_pool(capacity_bytes: int = CAPACITY_BYTES) -> BufferPool:
    return BufferPool(10, capacity_bytes, "storage.server_in_flight_bytes_max")


def nothing() -> None:
    """Nobody is told of the turn."""


def whole(wanted_bytes: int) -> MemoryWish:
    """A wish that takes all or nothing."""
    return MemoryWish(wanted_bytes, wanted_bytes)


# --- what the pool promises ---


@pytest.mark.parametrize(
    ("free_bytes", "wanted_bytes", "least_bytes", "reserved_bytes"),
    [
        (100, 35, 10, 35),  # as wanted, though it is no multiple
        (35, 35, 10, 35),
        (34, 35, 10, 30),
        (10, 35, 10, 10),
        (9, 35, 10, 0),
        (0, 35, 10, 0),
        (34, 35, 1, 34),
    ],
)
def test_a_grant_is_what_was_wanted_or_as_many_steps_as_are_free(
    free_bytes: int, wanted_bytes: int, least_bytes: int, reserved_bytes: int
) -> None:
    pool = a_pool()
    taken_bytes = pool.reserve(CAPACITY_BYTES - free_bytes)
    assert pool.reserve(wanted_bytes, least_bytes) == reserved_bytes
    assert pool.promised_bytes == taken_bytes + reserved_bytes
    pool.release(reserved_bytes)
    pool.release(taken_bytes)
    assert pool.promised_bytes == 0


# --- what a tenant is granted ---


def test_one_tenant_leaves_memory_to_whoever_comes_next() -> None:
    memory = SharedMemory(a_pool(640))
    assert memory.take("greedy", MemoryWish(600, 20)) == 480
    assert memory.take("greedy", MemoryWish(20, 20)) is None
    assert memory.take("a", MemoryWish(100, 20)) == 80  # all but the reserve
    assert memory.take("b", MemoryWish(100, 20)) is None  # two buffers of the reserve
    assert memory.take("b", MemoryWish(100, 10)) == 10  # one step, out of the reserve
    assert memory.take("b", MemoryWish(1, 1)) is None
    assert memory.take("c", MemoryWish(5, 5)) == 5
    assert memory.take("c", MemoryWish(5, 5)) == 5  # together no more than a buffer
    assert memory.held("greedy") == 480 / 640


def test_a_shortage_names_the_limit_and_what_the_tenant_holds() -> None:
    memory = SharedMemory(a_pool())
    memory.take("a", MemoryWish(60, 10))
    assert memory.shortage("a") == (
        "60 bytes are in flight, storage.server_in_flight_bytes_max is 100, and 'a' holds 60 of "
        "them"
    )


def test_memory_that_a_device_keeps_is_in_nobodys_share() -> None:
    staging = StagingMemory(10, 80)
    memory = SharedMemory(staging)
    assert memory.take("a", MemoryWish(60, 10)) == 60
    for _ in range(2):
        view = staging.take(10)
        staging.withdraw(view)
        staging.put(view)
    memory.give_back("a", 60)
    assert memory.take("a", MemoryWish(80, 10)) == 40


# --- tasks that wait ---


class Waiters:
    """A pool all of which is taken, and tasks that wait for it."""

    def __init__(self, waiting_max: int = 10, timeout_s: float = LONG_S) -> None:
        self.closed = asyncio.Event()
        self.pool = a_pool()
        self.grants = MemoryLine(self.pool, waiting_max, timeout_s, self.closed)
        self._tenants = map(str, itertools.count())
        assert self.pool.reserve(CAPACITY_BYTES) == CAPACITY_BYTES

    async def wait_for(
        self, wanted_bytes: int, tenant: str = "", gone: Gone | None = None
    ) -> asyncio.Task[ReservedMemory]:
        """A task, of another tenant each unless one is named, that waits for so many bytes, all or
        nothing.
        """
        before = self.grants.waiting
        tenant = tenant or next(self._tenants)
        task = asyncio.create_task(self.grants.reserve(tenant, whole(wanted_bytes), gone or never))
        await turns()
        assert self.grants.waiting == before + 1
        return task

    def check_all_came_back(self) -> None:
        assert (self.grants.waiting, self.pool.promised_bytes) == (0, 0)


async def never() -> None:
    """Whoever asks stays."""
    await asyncio.Event().wait()


async def turns(count: int = 5) -> None:
    """So many rounds of the loop."""
    for _ in range(count):
        await asyncio.sleep(0)


async def in_time(task: asyncio.Task[ReservedMemory]) -> int:
    """What was granted, and is given back with the pool's `release`."""
    async with asyncio.timeout(DEADLINE_S):
        return (await task).reserved_bytes


@pytest.mark.asyncio
async def test_memory_that_comes_back_in_another_thread_wakes_as_many_as_fit() -> None:
    waiters = Waiters()
    asyncio.get_running_loop().set_debug(True)  # it raises where a thread sets a task's event
    tasks = [await waiters.wait_for(40) for _ in range(3)]
    await asyncio.to_thread(waiters.pool.release, CAPACITY_BYTES)
    assert [await in_time(task) for task in tasks[:2]] == [40, 40]
    await turns()
    assert not tasks[2].done()
    assert "1 waiting" in repr(waiters.grants)
    tasks[0].result().release()
    assert await in_time(tasks[2]) == 40
    for task in tasks[1:]:
        task.result().release()
    waiters.check_all_came_back()


@pytest.mark.asyncio
async def test_whoever_is_cancelled_while_it_waits_lets_its_tenants_next_one_in() -> None:
    waiters = Waiters()
    waiters.pool.release(40)
    large, small = await waiters.wait_for(80, "a"), await waiters.wait_for(40, "a")
    large.cancel()
    with pytest.raises(asyncio.CancelledError):
        await in_time(large)
    assert await in_time(small) == 40
    waiters.pool.release(100)
    waiters.check_all_came_back()


@pytest.mark.asyncio
@pytest.mark.parametrize("round_count", range(ROUNDS_UNTIL_THROUGH + 1))
async def test_nothing_is_lost_where_one_is_cancelled_in_the_moment_of_its_grant(
    round_count: int,
) -> None:
    waiters = Waiters()
    first, second = await waiters.wait_for(100), await waiters.wait_for(100)
    waiters.pool.release(CAPACITY_BYTES)
    await turns(round_count)
    was_through = first.done()
    first.cancel()
    if was_through:
        (await first).release()
    else:
        with pytest.raises(asyncio.CancelledError):
            await in_time(first)
    assert round_count or not was_through
    assert was_through or round_count < ROUNDS_UNTIL_THROUGH
    (await second).release()
    waiters.check_all_came_back()


@pytest.mark.asyncio
async def test_a_wait_that_is_too_long_names_the_limits_and_frees_its_place() -> None:
    waiters = Waiters(waiting_max=1, timeout_s=0.01)
    said = (
        r"100 bytes are in flight, storage\.server_in_flight_bytes_max is 100, and '0' holds 0 "
        r"of them, and no room came for 0\.01 s \(scheduler\.queue_timeout_s\)"
    )
    for _ in range(2):
        with pytest.raises(Busy, match=said) as caught:
            await waiters.grants.reserve("0", whole(10), never)
        assert caught.value.details.retry_after_s == 0.01
    waiters.pool.release(CAPACITY_BYTES)
    waiters.check_all_came_back()


@pytest.mark.asyncio
async def test_where_the_line_is_full_the_next_is_refused_without_waiting() -> None:
    waiters = Waiters(waiting_max=1)
    waiting = await waiters.wait_for(100)
    with pytest.raises(Busy, match=r"scheduler\.queue_max is 1"):
        await waiters.grants.reserve("0", whole(10), never)
    waiters.pool.release(CAPACITY_BYTES)
    (await waiting).release()
    waiters.check_all_came_back()


@pytest.mark.asyncio
async def test_a_drain_refuses_those_who_wait_and_those_who_would_have_to() -> None:
    waiters = Waiters()
    tasks = [await waiters.wait_for(10) for _ in range(2)]
    waiters.closed.set()
    for task in tasks:
        with pytest.raises(Unavailable, match="the storage server is stopping"):
            await in_time(task)
    with pytest.raises(Unavailable):
        await waiters.grants.reserve("0", whole(10), never)
    waiters.pool.release(CAPACITY_BYTES)
    waiters.check_all_came_back()


@pytest.mark.asyncio
async def test_whoever_hangs_up_frees_its_place_for_its_tenants_next_one() -> None:
    waiters = Waiters()
    waiters.pool.release(40)
    left = asyncio.Event()

    async def gone() -> None:
        await left.wait()

    leaver, small = await waiters.wait_for(80, "a", gone), await waiters.wait_for(40, "a")
    left.set()
    with pytest.raises(ConnectionEnded):
        await in_time(leaver)
    assert await in_time(small) == 40
    waiters.pool.release(100)
    waiters.check_all_came_back()


@pytest.mark.asyncio
async def test_many_threads_that_release_lose_no_memory_and_forget_nobody() -> None:
    waiters = Waiters(waiting_max=200)

    async def use(number: int) -> None:
        wish = MemoryWish(1 + 7 * number % 100, 1 + number % 3)
        grant = await waiters.grants.reserve(str(number % 7), wish, never)
        await asyncio.to_thread(grant.release)

    tasks = [asyncio.create_task(use(number)) for number in range(200)]
    await turns()
    for task in tasks[::7]:
        task.cancel()
    waiters.pool.release(CAPACITY_BYTES)
    async with asyncio.timeout(DEADLINE_S):
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(one) for one in outcomes[::7]] == [asyncio.CancelledError] * len(tasks[::7])
    assert outcomes.count(None) == len(tasks) - len(tasks[::7])
    waiters.check_all_came_back()


@pytest.mark.asyncio
async def test_a_delivery_gives_a_part_back_while_a_tenant_waits_that_holds_less() -> None:
    pool = a_pool(40)
    grants = MemoryLine(pool, 10, LONG_S, asyncio.Event())
    large = await grants.reserve("a", MemoryWish(30, 10), never)
    assert not large.shrink_if_wanted(10, 10)
    other = await grants.reserve("b", whole(10), never)
    newcomer = asyncio.create_task(grants.reserve("c", whole(10), never))
    await turns()
    assert not large.shrink_if_wanted(10, 30)  # it needs what it has
    assert large.shrink_if_wanted(10, 10)
    assert await in_time(newcomer) == 10
    assert large.reserved_bytes == 20
    assert not large.shrink_if_wanted(10, 10)
    for grant in (large, other, newcomer.result(), newcomer.result()):
        grant.release()
    assert (pool.promised_bytes, grants.waiting) == (0, 0)


@pytest.mark.asyncio
async def test_a_delivery_keeps_what_it_has_from_others_of_its_kind_and_not_from_small_ones() -> (
    None
):
    pool = a_pool(40)
    grants = MemoryLine(pool, 10, LONG_S, asyncio.Event())
    large = await grants.reserve("a", MemoryWish(30, 10), never)
    other = await grants.reserve("b", whole(10), never)
    own = asyncio.create_task(grants.reserve("a", whole(10), never))
    await turns()
    assert not large.shrink_if_wanted(10, 10)
    small = asyncio.create_task(grants.reserve(get_holder("a", is_small=True), whole(10), never))
    await turns()
    assert large.shrink_if_wanted(10, 10)
    assert await in_time(small) == 10
    large.release()
    assert await in_time(own) == 10
    for grant in (other, small.result(), own.result()):
        grant.release()
    assert (pool.promised_bytes, grants.waiting) == (0, 0)


# --- what deliveries wish for ---


@pytest.mark.asyncio
async def test_a_small_range_of_a_large_object_gives_what_it_does_not_need_to_who_waits() -> None:
    sizes: Any = {"fragment_bytes": MIB, "delivery_in_flight_bytes_max": 8 * MIB}
    async with hosted(server_in_flight_bytes_max=8 * MIB, **sizes) as host:
        put(host.service.engine, "object", CONTENT)
        request = OpenObject(bucket=BUCKET.name, key="object")
        talking = asyncio.create_task(
            serve_object(host.service.gets, Conversation(host.stream), request)
        )
        assert isinstance(await host.reply(host.gateway), ObjectOpened)
        pool = host.service.gates.pool
        assert pool.promised_bytes == 6 * MIB  # what one tenant is lent
        waiting = asyncio.create_task(
            host.service.gates.bodies.reserve("other", whole(6 * MIB), never)
        )
        await turns()
        assert host.service.gates.bodies.waiting == 1
        choice = SendBody(offset_bytes=10, length_bytes=MIB - 10, into_socket=False)
        host.gateway.sendall(encode_frame(choice))
        assert await in_time(waiting) == 6 * MIB  # the range is under way: nobody reads it yet
        assert pool.promised_bytes == 7 * MIB
        with host.gateway.makefile("rb") as body:
            assert await asyncio.to_thread(body.read, MIB - 10) == CONTENT[10:MIB]
        async with asyncio.timeout(DEADLINE_S):
            await talking
        waiting.result().release()
        assert pool.promised_bytes == 0


def a_service(cap_gbps: float = 0.0) -> Service:
    return Service(
        Settings(
            server=ServerSettings(data_dir="/nonexistent"),
            scheduler=SchedulerSettings(cap_gbps=cap_gbps),
        ),
        MemoryEngine(),
    )


@pytest.mark.parametrize(
    ("cap_gbps", "slice_bytes", "rate_bytes_per_s", "expected_bytes"),
    [
        (0.0, 0, math.inf, 2 * MIB),
        (0.0, 0, 8.0 * MIB, 2 * MIB),
        (0.0, 0, 4.0 * MIB, MIB),
        (0.0, 0, 1.0 * MIB, 256 * KIB),
        (0.0, 0, 1.0, 64 * KIB),
        (0.0, 512 * KIB, 1.0 * MIB, 512 * KIB),  # a slice is verified whole
        (0.0, 8 * MIB, 1.0, 2 * MIB),
        (8.0, 0, math.inf, 500_000),
        (8.0, 0, 1.0 * MIB, 256 * KIB),
        (8.0, 0, 100.0 * MIB, 500_000),
    ],
)
def test_a_quarter_of_a_second_at_the_clients_rate_is_the_largest_fragment(
    cap_gbps: float, slice_bytes: int, rate_bytes_per_s: float, expected_bytes: int
) -> None:
    service = a_service(cap_gbps)
    try:
        assert (
            service.schedule.fragment_bytes(2 * MIB, slice_bytes, rate_bytes_per_s)
            == expected_bytes
        )
    finally:
        service.close()


@pytest.mark.parametrize(
    ("payload_bytes", "fragment_bytes", "wish"),
    [
        (0, 2 * MIB, MemoryWish(0, 0)),
        (1000, 2 * MIB, MemoryWish(1000, 1000)),
        (3 * MIB, 2 * MIB, MemoryWish(4 * MIB, 2 * MIB)),  # whole buffers
        (64 * MIB, 2 * MIB, MemoryWish(8 * MIB, 2 * MIB)),  # storage.delivery_in_flight_bytes_max
        (64 * MIB, 64 * KIB, MemoryWish(MIB, 64 * KIB)),  # a few fragments ahead
    ],
)
def test_a_body_wishes_for_a_few_fragments_and_one_at_least(
    payload_bytes: int, fragment_bytes: int, wish: MemoryWish
) -> None:
    service = a_service()
    try:
        assert service.gates.body_wish(payload_bytes, fragment_bytes) == wish
    finally:
        service.close()


@pytest.mark.asyncio
async def test_a_body_wishes_for_a_whole_fragment_though_less_may_be_in_flight() -> None:
    async with hosted(delivery_in_flight_bytes_max=MIB) as host:
        assert host.service.gates.body_wish(64 * MIB, 2 * MIB) == whole(2 * MIB)
