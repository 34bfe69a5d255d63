"""A get that fails at any step holds nothing: no hold, no memory, no lease, no place, no flow."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, NoReturn

import msgspec
import pytest

from objectcache_schemas.descriptor import DeliveryMode, Descriptor, MemoryTarget
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import KIB
from objectcache_schemas.messages.frames import encode_frame
from objectcache_schemas.messages.kv import DeliveryAccepted, KvGet
from objectcache_schemas.messages.reads import ObjectOpened, OpenObject, SendBody
from objectcache_storage_server.conversations.conversation import Conversation
from objectcache_storage_server.conversations.sessions import Session
from objectcache_storage_server.deliveries import body_gets, prefix_gets, target_gets
from objectcache_storage_server.deliveries.dispatcher import Dispatcher
from objectcache_storage_server.deliveries.plan import RangePlan
from objectcache_storage_server.deliveries.schedule import Schedule
from objectcache_storage_server.engines.base import OpenObjects
from objectcache_storage_server.engines.memory.engine import MemoryEngine
from objectcache_storage_server.s3 import object_gets
from objectcache_storage_server.testing import WrappedEngine, WrappedOpenObjects
from objectcache_storage_server.transports.shared_memory import SharedMemoryTransport
from objectcache_storage_server.transports.targets import Lease, RegisteredTarget, TargetRegistry
from tests.contract.engine_suite import put
from tests.integration.served import wait_until
from tests.storage_client import sealed_memory_file
from tests.unit.storage_server.test_service import BUCKET, DEADLINE_S, Host, hosted

CHUNK = Descriptor(("chunk",), 4, 16, 64 * KIB, DeliveryMode.LAYERWISE)


class Injected(Exception):
    """The fault of a test."""


def injected(*_: object, **__: object) -> NoReturn:
    raise Injected


def injected_after(action: Callable[..., object]) -> Callable[..., NoReturn]:
    """What fails once it has done its work."""

    def act(*args: object, **kwargs: object) -> NoReturn:
        action(*args, **kwargs)
        raise Injected

    return act


class Hold(WrappedOpenObjects):
    def close(self) -> None:
        assert isinstance(self._engine, HoldingEngine)
        self._engine.holds.discard(self)
        super().close()


class HoldingEngine(WrappedEngine):
    """The memory engine, which knows what is open."""

    def __init__(self) -> None:
        super().__init__(MemoryEngine())
        self.holds: set[Hold] = set()

    def open_many(
        self, bucket: str, keys: Sequence[str], *, are_prefix: bool = False
    ) -> OpenObjects:
        hold = Hold(self, self.inner.open_many(bucket, keys, are_prefix=are_prefix))
        self.holds.add(hold)
        return hold


class Gets:
    """A server with one chunk, and a client with a target."""

    def __init__(self, host: Host, engine: HoldingEngine) -> None:
        self.host, self.engine, self.service = host, engine, host.service
        put(engine, "chunk", bytes(CHUNK.chunk_bytes), block_bytes=CHUNK.per_layer_chunk_bytes)
        self.client, self.near = host.connection()
        self.session = Session("alice", self.near)
        file = sealed_memory_file(CHUNK.chunk_bytes)
        self.target: RegisteredTarget = self.service.targets.register(
            self.session, file, CHUNK.chunk_bytes
        )
        os.close(file)

    def request(self, *, into_target: bool) -> KvGet:
        where = MemoryTarget(
            transport="shared_memory",
            target_id=self.target.target_id,
            offset_bytes=0,
            length_bytes=CHUNK.chunk_bytes,
            tag=1,
        )
        descriptor = replace(CHUNK, rdma_target=where if into_target else None)
        return KvGet(
            bucket=BUCKET.name, identity="alice", request_id="r", descriptor=descriptor.to_bytes()
        )

    async def serve(self, request: KvGet | OpenObject) -> None:
        """The whole conversation, in time."""
        talk = Conversation(self.host.stream)
        async with asyncio.timeout(DEADLINE_S):
            if isinstance(request, KvGet):
                await prefix_gets.serve_kv_get(self.service.gets, talk, request)
            else:
                await object_gets.serve_object(self.service.gets, talk, request)

    def say(self, message: msgspec.Struct, *descriptors: int) -> None:
        socket.send_fds(self.host.gateway, [encode_frame(message)], descriptors)

    async def check_nothing_is_held(self) -> None:
        """At once, or when the last reader is out."""
        await asyncio.to_thread(wait_until, lambda: not self.held(), "everything to be let go")
        await asyncio.sleep(0)
        assert self.held() == {}

    def held(self) -> dict[str, object]:
        service = self.service
        state: dict[str, object] = {
            "grants": service.gates.pool.promised_bytes,
            "flows": service.schedule.state().delivery_count,
            "running": service.gates.entrance.running,
            "watched": service.gates.slow_bodies.watched + service.gates.slow_puts.watched,
            "leases": self.target.leases,
            "holds": self.engine.holds,
        }
        return {name: what for name, what in state.items() if what}


@asynccontextmanager
async def getting() -> AsyncGenerator[Gets]:
    engine = HoldingEngine()
    async with hosted(engine=engine) as host:
        one = Gets(host, engine)
        yield one
        await one.session.stop()
        one.service.targets.release(one.target, lambda: None)
        one.near.close()
        one.client.close()


BODY_STEPS: list[tuple[Any, str]] = [
    (prefix_gets, "plan_chunks"),
    (prefix_gets, "DeliveryTerms"),
    (body_gets, "BodyTransport"),
    (body_gets, "RunningDelivery"),
    (Dispatcher, "add"),
    (body_gets, "wait_admitted"),
    (body_gets, "accepted"),
]
TARGET_STEPS: list[tuple[Any, str]] = [
    (prefix_gets, "plan_chunks"),
    (TargetRegistry, "lease"),
    (SharedMemoryTransport, "__init__"),
    (target_gets, "RunningDelivery"),
    (Lease, "on_release"),
    (target_gets, "shape_of"),
    (target_gets, "ConsumptionWatch"),
    (Dispatcher, "add"),
    (target_gets, "wait_admitted"),
    (target_gets, "accepted"),
]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("into_target", "owner", "name"),
    [(False, *step) for step in BODY_STEPS] + [(True, *step) for step in TARGET_STEPS],
)
async def test_a_prefix_that_fails_at_any_step_holds_nothing(
    into_target: bool, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with getting() as one:
        monkeypatch.setattr(owner, name, injected)
        with pytest.raises(Injected):
            await one.serve(one.request(into_target=into_target))
        await one.check_nothing_is_held()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("into_target", "owner", "name"),
    [
        (False, Dispatcher, "add"),
        (True, Dispatcher, "add"),
        (True, target_gets, "ConsumptionWatch"),
    ],
)
async def test_what_had_begun_when_it_failed_ends(
    into_target: bool, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with getting() as one:
        monkeypatch.setattr(owner, name, injected_after(getattr(owner, name)))
        with pytest.raises(Injected):
            await one.serve(one.request(into_target=into_target))
        await one.check_nothing_is_held()


@pytest.mark.asyncio
async def test_without_memory_for_a_grant_nothing_else_is_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with getting() as one:
        monkeypatch.setattr(one.service.gates.pool, "reserve", injected)
        with pytest.raises(Injected):
            await one.serve(one.request(into_target=False))
        await one.check_nothing_is_held()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Schedule, "fragment_bytes"),
        (object_gets, "RangePlan"),
        (RangePlan, "fragments"),
        (Dispatcher, "add"),
    ],
)
async def test_an_object_that_fails_at_any_step_holds_nothing(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with getting() as one:
        monkeypatch.setattr(owner, name, injected)
        one.say(SendBody(offset_bytes=0, length_bytes=10, into_socket=False))
        with pytest.raises(Injected):
            await one.serve(OpenObject(bucket=BUCKET.name, key="chunk"))
        if name != "fragment_bytes":  # which is asked for before anything is answered
            assert isinstance(await one.host.reply(one.host.gateway), ObjectOpened)
        await one.check_nothing_is_held()


def no_socket() -> int:
    return os.open("/dev/null", os.O_RDWR)


def no_stream() -> int:
    return socket.socket(socket.AF_INET, socket.SOCK_DGRAM).detach()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("passed", "why"),
    [(None, "needs a socket"), (no_socket, "no socket"), (no_stream, "no stream")],
)
@pytest.mark.parametrize("is_object", [False, True])
async def test_what_is_passed_beside_send_body_is_a_stream_or_refused_and_closed(
    is_object: bool, passed: Callable[[], int] | None, why: str
) -> None:
    async with getting() as one:
        choice = SendBody(offset_bytes=0, length_bytes=CHUNK.chunk_bytes, into_socket=True)
        descriptors = [passed()] if passed else []
        one.say(choice, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        before = len(os.listdir("/proc/self/fd"))
        request = (
            OpenObject(bucket=BUCKET.name, key="chunk")
            if is_object
            else one.request(into_target=False)
        )
        with pytest.raises(InvalidRequest, match=why):
            await one.serve(request)
        answered = await one.host.reply(one.host.gateway)
        assert isinstance(answered, ObjectOpened if is_object else DeliveryAccepted)
        assert len(os.listdir("/proc/self/fd")) <= before  # the one that was passed is closed
        await one.check_nothing_is_held()


@pytest.mark.asyncio
async def test_objects_that_are_opened_for_a_caller_who_has_left_are_closed() -> None:
    async with getting() as one:
        loop = asyncio.get_running_loop()
        opening, opens, closed = asyncio.Event(), asyncio.Event(), asyncio.Event()

        def open_slowly() -> OpenObjects:
            loop.call_soon_threadsafe(opening.set)
            asyncio.run_coroutine_threadsafe(opens.wait(), loop).result(DEADLINE_S)
            return one.engine.open_many(BUCKET.name, ["chunk"])

        def close(opened: OpenObjects) -> None:
            opened.close()
            closed.set()

        asked = asyncio.create_task(one.service.calls.call_to_open(open_slowly, close))
        await opening.wait()
        asked.cancel()
        await asyncio.wait([asked])
        opens.set()
        async with asyncio.timeout(DEADLINE_S):
            await closed.wait()
        await one.check_nothing_is_held()


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ["", "agg"])
async def test_the_trace_of_a_refused_get_names_the_policy_and_the_path_that_was_asked(
    path: str,
) -> None:
    async with getting() as one:
        missing = replace(CHUNK, chunk_keys=("missing",)).to_bytes()
        with pytest.raises(Exception, match="not stored"):
            await one.serve(
                msgspec.structs.replace(
                    one.request(into_target=False), descriptor=missing, path=path
                )
            )
        one.say(SendBody(offset_bytes=0, length_bytes=1 << 40, into_socket=False))
        with pytest.raises(InvalidRequest, match="outside the object"):
            await one.serve(OpenObject(bucket=BUCKET.name, key="chunk"))
        object_trace, prefix_trace = (recorder.trace() for recorder in one.service.traces.latest(2))
        assert (prefix_trace.policy, prefix_trace.path) == (one.service.schedule.policy, path)
        assert (object_trace.policy, object_trace.path) == (one.service.schedule.policy, "s3tcp")
