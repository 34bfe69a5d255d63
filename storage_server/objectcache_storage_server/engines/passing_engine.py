"""An engine that passes every call on to another one, by one method where behaviour is added.

What a wrapper forgot would run the contract's slow default in place of the inner engine's own, and
nobody would see it. So each method is one line here that repeats no signature, and a test walks the
contract.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any, TypeVar, cast

from objectcache_schemas.records import ObjectInfo
from objectcache_storage_server.engines.base import Engine

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def passed_on(method: F) -> F:
    """The inner one's method of this name, called by the wrapper's `call`."""
    name = method.__name__

    def passing(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.call(name, 0, lambda: getattr(self.inner, name)(*args, **kwargs))

    passing.__name__ = name
    return cast(F, passing)


class PassingEngine(Engine):
    """An engine that behaves as `inner` does; owns it, and closes it."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner
        self.capabilities = inner.capabilities

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.inner!r}>"

    def call(self, operation: str, size_bytes: int, action: Callable[[], T]) -> T:
        """Carry out one operation of the contract, by its method's name. `size_bytes` is for what
        moves bytes, which no method of an engine itself does.
        """
        return action()

    create_bucket = passed_on(Engine.create_bucket)
    bucket = passed_on(Engine.bucket)
    fresh_bucket = passed_on(Engine.fresh_bucket)
    buckets = passed_on(Engine.buckets)
    delete_bucket = passed_on(Engine.delete_bucket)
    set_layout = passed_on(Engine.set_layout)
    set_policy = passed_on(Engine.set_policy)
    configure_bucket = passed_on(Engine.configure_bucket)
    usage = passed_on(Engine.usage)
    stage = passed_on(Engine.stage)
    stage_prefix = passed_on(Engine.stage_prefix)
    stage_joined = passed_on(Engine.stage_joined)
    commit = passed_on(Engine.commit)
    copy = passed_on(Engine.copy)
    replace_attributes = passed_on(Engine.replace_attributes)
    delete = passed_on(Engine.delete)
    expire = passed_on(Engine.expire)
    stat = passed_on(Engine.stat)
    stat_at_hand = passed_on(Engine.stat_at_hand)
    match = passed_on(Engine.match)
    open_many = passed_on(Engine.open_many)
    read_small = passed_on(Engine.read_small)
    scan = passed_on(Engine.scan)
    check_room = passed_on(Engine.check_room)
    status = passed_on(Engine.status)
    totals = passed_on(Engine.totals)
    check = passed_on(Engine.check)
    take_checkpoint = passed_on(Engine.take_checkpoint)
    pin = passed_on(Engine.pin)

    @contextlib.contextmanager
    def scanning(
        self, bucket: str
    ) -> Generator[Callable[[str, str, int], list[ObjectInfo]], None, None]:
        with self.inner.scanning(bucket) as scan:
            yield lambda prefix, after, limit: self.call(
                "scan", 0, lambda: scan(prefix, after, limit)
            )

    @property
    def damaged_count(self) -> int:
        return self.inner.damaged_count

    @property
    def flush_failure(self) -> str:
        return self.inner.flush_failure

    @property
    def store_failure(self) -> str:
        return self.inner.store_failure

    def close(self) -> None:
        self.inner.close()
