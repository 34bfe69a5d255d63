"""docs/architecture.md names what is there, and walks through the storage server as requests do."""

from __future__ import annotations

import ast
import asyncio
import gc
import os
import re
import sys
import threading
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import objectcache_storage_server
from objectcache_runtime.settings import Settings
from objectcache_schemas.descriptor import DeliveryMode, Descriptor, MemoryTarget
from objectcache_schemas.messages.kv import DeliveryAccepted, KvGet, KvPut, KvStored
from objectcache_schemas.messages.message import Message
from objectcache_storage_server.connections.handlers import HANDLERS
from objectcache_storage_server.conversations.conversation import Conversation
from objectcache_storage_server.conversations.sessions import Session
from objectcache_storage_server.engines.memory.engine import MemoryEngine
from tests.contract.engine_suite import put
from tests.storage_client import sealed_memory_file
from tests.unit.storage_server.test_service import BUCKET, DEADLINE_S, hosted
from tests.unit.test_floor_plan import PACKAGES, modules

DOCUMENT = (Path(__file__).parents[3] / "docs" / "architecture.md").read_text("utf-8")

# --- names ---

NAMES = sorted(set(re.findall(r"`([A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*)`", DOCUMENT)))
CODES = {"SlowDown"}  # of S3's errors


class Tree:
    """Every module by the ends of its dotted name, with what it defines, and members of classes."""

    def __init__(self) -> None:
        self.definitions: dict[str, set[str]] = defaultdict(set)
        self.members: dict[str, set[str]] = defaultdict(set)
        for top in PACKAGES:
            for name, file in modules(top):
                parts = name.split(".")
                body = ast.parse(file.read_text()).body
                names = {found for node in body for found in defined(node)}
                for begin in range(len(parts)):
                    self.definitions[".".join(parts[begin:])] |= names
                for node in body:
                    if isinstance(node, ast.ClassDef):
                        self.members[node.name] |= {
                            found for inner in ast.walk(node) for found in defined(inner)
                        }

    def has(self, name: str) -> bool:
        """Whether it is a module or room, something that a module defines, or a class' member."""
        parts = name.split(".")
        for end in range(len(parts), 0, -1):
            module, rest = ".".join(parts[:end]), parts[end:]
            if module in self.definitions and (not rest or rest[0] in self.definitions[module]):
                return len(rest) < 2 or rest[1] in self.members[rest[0]]
        return parts[0] in self.members and (len(parts) == 1 or parts[1] in self.members[parts[0]])


def defined(node: ast.AST) -> set[str]:
    """The names that a statement gives to something, of itself or of a class' object."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.AnnAssign(target=ast.Name(id=name) | ast.Attribute(attr=name)):
            return {name}
        case ast.Assign(targets=targets):
            return {one.id for one in targets if isinstance(one, ast.Name)} | {
                one.attr for one in targets if isinstance(one, ast.Attribute)
            }
    return set()


def test_every_module_and_class_that_is_named_is_there() -> None:
    tree, settings = Tree(), Settings()
    missing = []
    for name in NAMES:
        section, _, setting = name.partition(".")
        is_setting = setting and hasattr(getattr(settings, section, None), setting)
        is_name = "." in name or (name[0].isupper() and not name.isupper() and name not in CODES)
        if is_name and not is_setting and not tree.has(name):
            missing.append(name)
    assert missing == []


# --- the walk ---

PACKAGE = str(Path(objectcache_storage_server.__file__).parent) + os.sep
KEYS = tuple(f"{number:064x}" for number in range(4))
LAYERS, SLICE_BYTES = 3, 4096
RETURNS_SPARED = 10  # by as many fewer, the document is to say so
PAYLOAD_BYTES = LAYERS * SLICE_BYTES * len(KEYS)


class Walk:
    """The rooms whose functions are called, in the order of the calls, until `stop`. Readers, who
    have a delivery already, are not followed.
    """

    def __init__(self) -> None:
        self._rooms: list[str] = []
        self._frames: list[FrameType] = []  # of coroutines, which are entered again and again
        self._goes_on = True

    @contextmanager
    def watched(self) -> Generator[None]:
        """Calls in the body, and in threads that begin in it. Coroutines that other tests left are
        not ended meanwhile, which would be calls, too.
        """
        gc.collect()
        gc.disable()
        threading.setprofile(self._event)
        sys.setprofile(self._event)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            gc.enable()

    def stop(self) -> None:
        self._goes_on = False

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not self._goes_on or not file.startswith(PACKAGE):
            return
        if threading.current_thread().name.startswith("reader-"):
            return
        if not any(frame is seen for seen in self._frames):
            self._frames.append(frame)
            module = file.removeprefix(PACKAGE).removesuffix(".py")
            room = module.split(os.sep)[0]
            # The engine is called through what times it.
            self._rooms.append("engines" if module == "counts/engine_times" else room)

    @property
    def stays(self) -> list[str]:
        """Runs of calls into one room."""
        return [room for room, _ in groupby(self._rooms)]

    @property
    def returns(self) -> int:
        """Stays in a room that was left before."""
        return len(self.stays) - len(set(self.stays))


async def walked(kind: type[KvGet | KvPut], until: type[Message]) -> Walk:
    """From the message to the answer."""
    engine, walk = MemoryEngine(), Walk()
    async with hosted(engine=engine) as host:
        if kind is KvGet:
            for key in KEYS:
                put(engine, key, bytes(LAYERS * SLICE_BYTES), block_bytes=SLICE_BYTES)
        far, near = host.connection()
        session, file = Session("alice", near), sealed_memory_file(PAYLOAD_BYTES)
        target = host.service.targets.register(session, file, PAYLOAD_BYTES)
        os.close(file)
        where = MemoryTarget(
            transport="shared_memory",
            target_id=target.target_id,
            offset_bytes=0,
            length_bytes=PAYLOAD_BYTES,
            tag=1,
        )
        descriptor = Descriptor(
            KEYS, LAYERS, 16, SLICE_BYTES, DeliveryMode.LAYERWISE, rdma_target=where
        ).to_bytes()
        talk = Conversation(host.stream)
        send = talk.send

        async def sent(message: Any) -> None:
            if isinstance(message, until):
                walk.stop()
            await send(message)

        talk.send = sent  # type: ignore[method-assign]
        request: KvGet | KvPut
        if kind is KvGet:
            request = KvGet(
                bucket=BUCKET.name, identity="alice", request_id="r", descriptor=descriptor
            )
        else:
            request = KvPut(bucket=BUCKET.name, identity="alice", descriptor=descriptor)
        with walk.watched():
            async with asyncio.timeout(DEADLINE_S):
                await HANDLERS[kind](host.service, talk, request)
        await session.stop()
        host.service.targets.release(target, lambda: None)
        near.close()
        far.close()
    assert not walk._goes_on
    return walk


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("kind", "until"), [(KvGet, DeliveryAccepted), (KvPut, KvStored)], ids=["get", "put"]
)
async def test_rooms_and_returns_of_a_get_and_of_a_put_are_as_told(
    kind: type[KvGet | KvPut], until: type[Message]
) -> None:
    walk = await walked(kind, until)
    what = "get into a target" if kind is KvGet else "put out of a target"
    told = re.search(
        rf"A {what} walks through ([0-9]+) rooms with at most ([0-9]+) returns",
        " ".join(DOCUMENT.split()),
    )
    assert told is not None
    rooms, returns_max = int(told[1]), int(told[2])
    assert len(set(walk.stays)) == rooms, walk.stays
    assert returns_max - RETURNS_SPARED < walk.returns <= returns_max, walk.stays
