"""Objects of a store's part of a bucket, by names relative to it. Methods run in the loop of
`S3Calls`.
"""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError
from obstore.store import S3Store as Bucket

from objectcache_schemas.errors import InvalidRequest, Unavailable
from objectcache_storage_server.engines.stores.s3.s3_calls import MissingKey, check_answers, until
from objectcache_storage_server.engines.stores.s3.s3_settings import S3Settings, obstore_options

MARKER = "store"
_MARKER = re.compile(rb"objectcache store in S3 1\nstore ([0-9a-f]{32})\n")
PAGE = 1000
DELETES_AT_ONCE = 1000  # of the protocol


class S3Objects:
    """See the module's docstring. Errors are those of `until` where no others are named."""

    def __init__(self, settings: S3Settings) -> None:
        self.settings = settings
        self.store_id = ""
        self.was_made = False
        self._bucket = Bucket(settings.bucket, **obstore_options(settings))

    async def put(
        self, name: str, content: bytes, deadline_s: float, *, create: bool = False
    ) -> None:
        """Store an object; with `create` only where there is none, else `AlreadyExistsError`."""
        key = self.settings.key(name)
        mode: Any = "create" if create else "overwrite"
        try:
            await until(
                deadline_s,
                "put an object",
                lambda: obstore.put_async(
                    self._bucket, key, content, mode=mode, use_multipart=False
                ),
                is_put=True,
            )
        except MissingKey as error:
            raise self._no_bucket() from error

    async def get(self, name: str, deadline_s: float) -> bytes:
        """A whole object; `MissingKey` may be the bucket's."""
        key = self.settings.key(name)

        async def get() -> bytes:
            answer = await obstore.get_async(self._bucket, key)
            return bytes(await answer.bytes_async())

        return await until(deadline_s, "get an object", get)

    async def get_range(
        self, name: str, begin_bytes: int, end_bytes: int, deadline_s: float
    ) -> memoryview:
        """Bytes of an object, fewer where it is shorter; `MissingKey` may be the bucket's."""
        key = self.settings.key(name)
        answer = await until(
            deadline_s,
            "read an object",
            lambda: obstore.get_range_async(self._bucket, key, start=begin_bytes, end=end_bytes),
        )
        return memoryview(answer)

    async def size_bytes(self, name: str, deadline_s: float) -> int:
        """An object's size; `MissingKey` may be the bucket's."""
        key = self.settings.key(name)
        answer = await until(
            deadline_s, "look at an object", lambda: obstore.head_async(self._bucket, key)
        )
        return int(answer["size"])

    async def page(self, folder: str, after: str, deadline_s: float) -> list[tuple[str, int]]:
        """Up to PAGE names below a folder, without it, and their objects' sizes, in order: the
        first ones after `after`. Fewer are the last.
        """
        prefix = self.settings.key(folder)
        offset = prefix + after if after else None

        async def page() -> list[tuple[str, int]]:
            listing = obstore.list(self._bucket, prefix=prefix, offset=offset, chunk_size=PAGE)
            async for chunk in listing:
                return [(item["path"].removeprefix(prefix), item["size"]) for item in chunk]
            return []

        try:
            return await until(deadline_s, "list objects", page)
        except MissingKey as error:
            raise self._no_bucket() from error

    async def names(
        self, folder: str, after: str, deadline_s: float
    ) -> AsyncIterator[tuple[str, int]]:
        """What all pages have."""
        while True:
            found = await self.page(folder, after, deadline_s)
            for named in found:
                yield named
            if len(found) < PAGE:
                return
            after = found[-1][0]

    async def delete(self, names: Sequence[str], deadline_s: float) -> None:
        """Remove objects, which may be gone."""
        for begin in range(0, len(names), DELETES_AT_ONCE):
            keys = [self.settings.key(name) for name in names[begin : begin + DELETES_AT_ONCE]]
            try:
                delete = partial(obstore.delete_async, self._bucket, keys)
                await until(deadline_s, "delete objects", delete)
            except MissingKey as error:
                raise self._no_bucket() from error

    # --- the store itself ---

    async def check_there(self, deadline_s: float) -> None:
        """Raise `Unavailable` unless the store is there: then what was not found in it is not."""
        if await self._marked_id(deadline_s) != self.store_id:
            raise Unavailable(f"{self.settings.where()} is another store by now")

    async def open(self, create: bool, deadline_s: float) -> None:
        """Find the store, or make it. Raises `InvalidRequest` where the server has no conditional
        PUT, `Unavailable`.
        """
        if create:
            key = self.settings.key(MARKER)
            await check_answers(
                self.settings.where(), lambda: obstore.head_async(self._bucket, key)
            )
        await self._check_conditional_put(deadline_s)
        made_id = uuid.uuid4().hex
        if create:
            marker = f"objectcache store in S3 1\nstore {made_id}\n".encode()
            with contextlib.suppress(AlreadyExistsError):
                await self.put(MARKER, marker, deadline_s, create=True)
        self.store_id = await self._marked_id(deadline_s)
        self.was_made = self.store_id == made_id

    async def _marked_id(self, deadline_s: float) -> str:
        try:
            found = _MARKER.fullmatch(await self.get(MARKER, deadline_s))
        except MissingKey as error:
            raise Unavailable(
                f"there is no store in {self.settings.where()}: make the bucket, and have a store "
                "made in it"
            ) from error
        if found is None:
            raise Unavailable(f"{self.settings.where()} has no store of this version")
        return found[1].decode()

    async def _check_conditional_put(self, deadline_s: float) -> None:
        """Put an object twice: the second must be refused."""
        name, is_refused = f"probe/{uuid.uuid4().hex}", False
        try:
            await self.put(name, b"first", deadline_s, create=True)
            await self.put(name, b"second", deadline_s, create=True)
        except AlreadyExistsError:
            is_refused = True
        await self.delete([name], deadline_s)
        if not is_refused:
            raise InvalidRequest(
                f"the server of {self.settings.where()} ignores If-None-Match on PUT, so two "
                "servers could have one record of the log: use one that has conditional writes "
                "(AWS, Ceph's radosgw, MinIO, Cloudflare R2, SeaweedFS)"
            )

    def _no_bucket(self) -> Unavailable:
        return Unavailable(f"there is no bucket {self.settings.bucket} at {self.settings.where()}")
