"""What a route of the admin API is: everything that serves it, checks it and documents it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from aiohttp import web

from objectcache_gateway.admin.serving.accounts_view import AccountsView
from objectcache_gateway.admin.serving.change_audit import ChangeAudit
from objectcache_gateway.admin.serving.gateway_processes import GatewayProcesses
from objectcache_gateway.admin.serving.media_types import JSON
from objectcache_gateway.storage.storage_fleet import StorageFleet
from objectcache_runtime.settings import Settings
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.operators.admin_api import PAGE_ITEMS_MAX, Body

BODY_BYTES_MAX = 1 << 20  # 10,000 keys to pin are a tenth of it

B = TypeVar("B", bound=Body, covariant=True)
Q = TypeVar("Q", bound=Body, covariant=True)
Item = TypeVar("Item")


class Nothing(Body, frozen=True):
    """No body, or no query."""


@dataclass(frozen=True, slots=True)
class ApiCaller:
    """Who asks, once that is established."""

    name: str  # "root", "peer uid 1000", "token NAME (ID)"
    scopes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Reach:
    """What handlers reach: the storage server, the accounts, the other processes."""

    settings: Settings
    storage: StorageFleet
    accounts: AccountsView
    gateways: GatewayProcesses
    root_access_key: str
    audit_log: ChangeAudit


@dataclass(frozen=True, slots=True)
class Call(Generic[B, Q]):
    """One request, checked: who asks, which path parameters, which body and query."""

    reach: Reach
    asker: ApiCaller
    names: Mapping[str, str]
    body: B
    query: Q
    now_s: float
    request: web.Request

    @property
    def storage(self) -> StorageFleet:
        """The storage server."""
        return self.reach.storage

    @property
    def accounts(self) -> AccountsView:
        """Users, keys and tokens."""
        return self.reach.accounts


Handler = Callable[[Call[Any, Any]], Awaitable[msgspec.Struct | web.StreamResponse | None]]


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path. `scope` None is open to everybody, "" to whoever has credentials.

    `reply` None is an answer without a body. Where `content_type` is not JSON, `reply` is what each
    line holds, if it is a stream, and the handler answers by itself.
    """

    method: str
    path: str  # "/v1/users/{name}"
    scope: str | None
    summary: str
    handler: Handler
    reply: type[msgspec.Struct] | None = None
    body: type[Body] = Nothing
    query: type[Body] = Nothing
    status: int = 200
    content_type: str = JSON
    body_bytes_max: int = BODY_BYTES_MAX

    @property
    def changes(self) -> bool:
        """Whether a request may change something, and so goes to the audit log."""
        return self.method != "GET"

    @property
    def parameter_names(self) -> list[str]:
        """The path's parameters, in order."""
        parts = self.path.split("/")
        return [part[1:-1] for part in parts if part.startswith("{")]


def page_of(
    items: Mapping[str, Item], after: str, limit: int
) -> tuple[tuple[Item, ...], str | None]:
    """Items whose names follow `after`, and the name that continues; None is the end."""
    assert 1 <= limit <= PAGE_ITEMS_MAX
    names = sorted(name for name in items if name > after)
    shown = names[:limit]
    return tuple(items[name] for name in shown), shown[-1] if len(names) > limit else None


def changed(record: Any, change: Body) -> Any:
    """A record with the fields of a change that are not absent; raises where none is given."""
    given = {
        field: value
        for field in change.__struct_fields__
        if (value := getattr(change, field)) is not msgspec.UNSET
    }
    if not given:
        known = ", ".join(change.__struct_fields__)
        raise InvalidRequest(f"the body changes nothing; give one of {known}")
    return msgspec.structs.replace(record, **given)
