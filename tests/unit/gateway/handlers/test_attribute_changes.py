"""Changes of an object's attributes: none undoes another's, and a fight ends with a refusal."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from objectcache_gateway.answering.http_exchange import Exchange
from objectcache_gateway.handlers.objects.attribute_changes import (
    CHANGE_ATTEMPTS_MAX,
    change_attributes,
)
from objectcache_schemas.errors import Conflict, NotFound
from objectcache_schemas.messages.reads import Object, StatObject
from objectcache_schemas.messages.writes import ReplaceAttributes
from objectcache_schemas.records import AclGrant, AclPermission, ObjectAttributes
from objectcache_storage_server.engines.memory.engine import MemoryEngine
from tests.contract.engine_suite import BUCKET, put

PUBLIC = ObjectAttributes(acl=(AclGrant("everybody", AclPermission.READ),))


class ContestedStorage:
    """A memory engine in which others change the object after every look, so many times."""

    def __init__(self, contests: int) -> None:
        self.engine = MemoryEngine()
        self.engine.create_bucket(BUCKET)
        self._contests = contests

    async def call(self, request: object, reply_type: type[Object]) -> Object:
        if isinstance(request, StatObject):
            info = self.engine.stat(request.bucket, request.key)
            if self._contests:
                self._contests -= 1
                others = ObjectAttributes(user_metadata={"left": str(self._contests)})
                self.engine.replace_attributes(request.bucket, info, others)
            return Object(info=info)
        assert isinstance(request, ReplaceAttributes)
        changed = self.engine.replace_attributes(request.bucket, request.seen, request.attributes)
        return Object(info=changed)

    def exchange(self) -> Exchange:
        return cast(
            Exchange, SimpleNamespace(storage=self, bucket=BUCKET.name, key="key", query={})
        )


def tagged(seen: ObjectAttributes) -> ObjectAttributes:
    return msgspec.structs.replace(seen, tags={"kind": "chunk"})


@pytest.mark.asyncio
async def test_a_change_is_made_again_of_what_others_made_meanwhile() -> None:
    storage = ContestedStorage(contests=CHANGE_ATTEMPTS_MAX - 1)
    put(storage.engine, "key", b"data", attributes=PUBLIC)
    await change_attributes(storage.exchange(), tagged)
    stored = storage.engine.stat(BUCKET.name, "key").attributes
    assert stored == ObjectAttributes(user_metadata={"left": "0"}, tags={"kind": "chunk"})


@pytest.mark.asyncio
async def test_who_never_wins_is_told_to_try_again_and_has_changed_nothing() -> None:
    storage = ContestedStorage(contests=CHANGE_ATTEMPTS_MAX)
    put(storage.engine, "key", b"data", attributes=PUBLIC)
    with pytest.raises(Conflict) as caught:
        await change_attributes(storage.exchange(), tagged)
    assert caught.value.code == "OperationAborted"
    assert storage.engine.stat(BUCKET.name, "key").attributes.tags == {}


@pytest.mark.asyncio
async def test_what_is_not_stored_cannot_be_changed() -> None:
    with pytest.raises(NotFound) as caught:
        await change_attributes(ContestedStorage(0).exchange(), tagged)
    assert caught.value.code == "NoSuchKey"
