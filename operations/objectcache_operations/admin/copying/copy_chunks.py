"""Moves the chunks of a KV bucket that the target does not have."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from objectcache import KvBucket
from objectcache_operations.admin.copying.endpoints import Side
from objectcache_operations.admin.copying.inventory import (
    SOURCE,
    TARGET,
    Amount,
    Inventory,
    Listed,
)
from objectcache_operations.admin.copying.listings import listed_pages
from objectcache_schemas.errors import Busy, InvalidRequest, NotFound, Unavailable
from objectcache_schemas.layout import KvLayout

BATCH_BYTES_MAX = 64 << 20  # held in memory, twice at most
BATCH_CHUNKS_MAX = 1024
TRIES = 5
LISTINGS = 3  # of a target that seems to lack something
PAUSE_S = 2.0  # before another try, where the server does not say

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Copied:
    """What became of a bucket. What is gone left the source while it was copied."""

    bucket: str
    source: Amount
    there: Amount
    copied: Amount
    gone: int
    arrived: Amount  # of the source, by a listing of the target in the end

    @property
    def is_whole(self) -> bool:
        """Whether the target has all that the source had, less what is gone."""
        return self.arrived == self.source


class BucketCopy:
    """One bucket's way from source to target. For one thread."""

    def __init__(
        self, bucket: str, source: Side, target: Side, on_progress: Callable[[Amount, int], None]
    ) -> None:
        """`on_progress` is told what was copied so far, and how many bytes are to be."""
        self._name = bucket
        self._source = source
        self._target = target
        self._on_progress = on_progress
        self._gone: list[str] = []
        self._copied = Amount(0, 0)

    def run(self, *, is_dry: bool) -> Copied:
        """Copy what is missing; a dry run looks and changes nothing.

        Raises `InvalidRequest` for a bucket without a KV layout, `Conflict` where the target has
        another layout or other bytes, and what the servers answer.
        """
        layout = self._layout()
        with Inventory() as inventory:
            inventory.fill(SOURCE, listed_pages(self._source.channel, self._name))
            if not is_dry:
                self._make_target(layout)
            self._list_target(inventory)
            there = inventory.same()
            if not is_dry:
                self._copy(inventory, layout)
                inventory.forget(self._gone)
                self._await_arrived(inventory)
            return Copied(
                self._name,
                inventory.source(),
                there,
                self._copied,
                len(self._gone),
                inventory.arrived(),
            )

    def _layout(self) -> KvLayout:
        try:
            return self._source.client.get_layout(self._name)
        except NotFound as error:
            if error.code != "NoSuchKvLayout":
                raise
            raise InvalidRequest(
                f"bucket {self._name} has no KV layout: any S3 client copies it, such as rclone "
                f"sync SOURCE:{self._name} TARGET:{self._name}"
            ) from error

    def _make_target(self, layout: KvLayout) -> None:
        """The bucket with its layout, where it is missing; one that is there may be anybody's."""
        target = self._target.client
        try:
            if target.get_layout(self._name) == layout:
                return
        except NotFound as error:
            if error.code == "NoSuchBucket":
                target.create_bucket(self._name)
        target.put_layout(self._name, layout)

    def _list_target(self, inventory: Inventory) -> None:
        try:
            inventory.fill(TARGET, listed_pages(self._target.channel, self._name))
        except NotFound:
            inventory.fill(TARGET, ())  # a dry run makes no bucket

    def _await_arrived(self, inventory: Inventory) -> None:
        """List the target until it has all, a few times: of a shared store another server may
        answer, which has not replayed the last puts yet.
        """
        for number in range(LISTINGS):
            if number:
                time.sleep(PAUSE_S)
            self._list_target(inventory)
            if inventory.arrived() == inventory.source():
                return

    def _copy(self, inventory: Inventory, layout: KvLayout) -> None:
        source = self._source.client.kv_bucket(self._name, layout)
        target = self._target.client.kv_bucket(self._name, layout)
        chunk_bytes = layout.num_layers * layout.per_layer_chunk_bytes
        to_copy_bytes = inventory.source().size_bytes - inventory.same().size_bytes
        for keys in batches(inventory.missing(), chunk_bytes):
            held, chunks = self._fetched(source, keys)
            if held:
                tried(lambda held=held, chunks=chunks: target.put(held, chunks))  # type: ignore[misc]
            count = self._copied.count + len(held)
            self._copied = Amount(count, count * chunk_bytes)
            self._on_progress(self._copied, to_copy_bytes)

    def _fetched(self, source: KvBucket, keys: Sequence[str]) -> tuple[list[str], Any]:
        """The keys that are there still, and their bytes: uint8[chunks, layers, slice]."""
        held = list(keys)
        while held:
            try:
                return held, tried(lambda: _fetch(source, held))
            except NotFound as error:
                index = error.details.missing_index
                if index is None:
                    raise
                self._gone.append(held.pop(index))
        return held, None


def _fetch(source: KvBucket, keys: Sequence[str]) -> Any:
    with source.fetch(keys, delivery="chunkwise") as delivery:
        return delivery.wait().transpose(1, 0, 2)


def batches(missing: Iterable[Listed], chunk_bytes: int) -> Iterator[list[str]]:
    """Keys of chunks that were stored by one put, as far as their times tell, which the target's
    store then lays side by side, too; larger puts are cut.
    """
    count = max(1, min(BATCH_CHUNKS_MAX, BATCH_BYTES_MAX // chunk_bytes))
    for _, together in itertools.groupby(missing, key=lambda one: one.modified):
        while keys := [one.key for one in itertools.islice(together, count)]:
            yield keys


def tried(step: Callable[[], T]) -> T:
    """The step's result; a server that is busy or away is asked again, a few times."""
    for _ in range(TRIES - 1):
        try:
            return step()
        except (Busy, Unavailable) as error:
            time.sleep(error.details.retry_after_s or PAUSE_S)
    return step()
