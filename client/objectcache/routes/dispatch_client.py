"""What a client asks of the dispatch service: which relays there are, and a delivery's route.

The service may be away: the client chooses by itself then, by the reports of the relays it knows.
"""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import msgspec

from objectcache.channel.endpoint import Endpoint
from objectcache.channel.http_channel import Reply
from objectcache.channel.requests import GatewayRequest
from objectcache.routes.dispatch_replicas import DispatchReplica, DispatchReplicas
from objectcache.routes.json_answers import read_json
from objectcache.routes.route_settings import RelayAddress
from objectcache.routes.told_lists import ToldList, ToldLists
from objectcache.thread_reserve import ThreadReserve
from objectcache_schemas.descriptor import Descriptor
from objectcache_schemas.errors import AccessDenied, InvalidRequest
from objectcache_schemas.operators.dispatch_api import DispatchName, RelayUrl, RouteRequest

# Between two looks at which relays there are, while deliveries are being made: drawn between these,
# so that many clients do not ask together.
LIST_S = (4.0, 6.0)
ANSWER_S = 5.0
ROUTE_ANSWER_S = 0.25  # a delivery waits for it
PARTS_MAX = 16  # of one delivery; today's service makes two
LIST, ROUTE, END = "list", "route", "end"  # kinds of calls


class _NamedRelay(msgspec.Struct, frozen=True):
    name: DispatchName
    relay: RelayUrl


class _NamedRelays(msgspec.Struct, frozen=True):
    relays: tuple[_NamedRelay, ...]


class AnsweredPart(msgspec.Struct, frozen=True):
    """What one node reads: `relay` is null for this client's own; 0 chunks are all of them."""

    relay: DispatchName | None = None
    relay_url: RelayUrl | None = None
    chunk_count: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)] = 0

    @property
    def way(self) -> str | None:
        """What tells the part from the others."""
        return None if self.relay is None else self.relay_url or self.relay


class _Reservation(msgspec.Struct, frozen=True):
    """As far as a client looks at it."""

    name: DispatchName
    parts: Annotated[tuple[AnsweredPart, ...], msgspec.Meta(max_length=PARTS_MAX)] = ()

    def check(self, chunk_count: int, *, divides: bool) -> None:
        """Raise `InvalidRequest` unless the parts, where there are any, are so many chunks."""
        counts = [part.chunk_count for part in self.parts]
        if counts in ([], [0]):
            return
        if sum(counts) != chunk_count or 0 in counts:
            raise InvalidRequest(f"its parts have {counts} of {chunk_count} chunks")
        if len({part.way for part in self.parts}) < len(counts):
            raise InvalidRequest("its parts name a way twice")
        if len(counts) > 1 and not divides:
            raise InvalidRequest(f"it has {len(counts)} parts where none was asked for")


@dataclass(frozen=True, slots=True)
class AnsweredRoute:
    """A reserved route. `done` tells whoever reserved it, and returns at once."""

    parts: tuple[AnsweredPart, ...]
    done: Callable[[], None]


class DispatchClient:
    """Thread-safe. `listed` is called with the relays that have registered at any replica, whenever
    the service has said which they are, or that they are the same.
    """

    def __init__(
        self,
        replicas: DispatchReplicas,
        worker: str,
        threads: ThreadReserve,
        listed: Callable[[Sequence[RelayAddress]], None],
    ) -> None:
        """`worker` is this engine's name at the service; empty: routes are not asked for."""
        self._replicas = replicas
        self._worker = worker
        self._threads = threads
        self._listed = listed
        self._lock = threading.Lock()
        self._is_listing = False
        self._list_due_s = float("-inf")
        self._lists = ToldLists[DispatchReplica](list(replicas))

    def want(self) -> None:
        """A delivery is being made that may come over a relay: look for relays, in the background,
        where that was long ago, or where who was away may be back.
        """
        with self._lock:
            is_due = time.monotonic() >= self._list_due_s or self._replicas.may_be_back
            if self._is_listing or not is_due or not self._replicas.may_be_asked:
                return
            self._is_listing = True
        self._threads.start(self._list)

    def _list(self) -> None:
        try:
            self._list_once()
        finally:
            with self._lock:
                self._is_listing = False
                self._list_due_s = time.monotonic() + random.uniform(*LIST_S)  # noqa: S311 - no secret

    def _list_once(self) -> None:
        """Relays that any replica knows count: one that was just restarted, or that some relays
        cannot reach, knows none, or not all. Nobody knows any where every replica says so.
        """
        answered, full = list[DispatchReplica](), list[DispatchReplica]()
        for replica in self._replicas.to_ask(can_wait=True):
            if not self._list_of(replica):
                continue
            answered.append(replica)
            if (told := self._lists.of(replica)) is not None and told.relays:
                full.append(replica)
                self._listed(self._lists.relays(time.monotonic()))
        self._lists.answered_alone(answered)
        if full and len(answered) < len(self._replicas):  # what those said who are away counts less
            self._listed(self._lists.relays(time.monotonic()))
        if full and full[0] is not answered[0]:
            self._replicas.prefer(full[0])
        if not full and len(answered) == len(self._replicas):
            self._listed([])

    def _list_of(self, replica: DispatchReplica) -> bool:
        """Whether this one says which it knows."""
        before = self._lists.of(replica)
        known = {"if-none-match": before.tag} if before is not None and before.tag else {}
        asked = GatewayRequest("GET", "/v1/relays", headers=known)
        told = self._replicas.call_one(
            replica, LIST, asked, ANSWER_S, self._blamed, partial(self._relays, before)
        )
        if told is not None:
            self._lists.told(replica, told)
        return told is not None

    def _relays(self, before: ToldList | None, _: DispatchReplica, reply: Reply) -> ToldList:
        now_s = time.monotonic()
        if before is not None and before.tag and not reply.body:  # nothing has changed
            return replace(before, told_s=now_s)
        found = read_json(reply.body, _NamedRelays)
        relays = tuple(RelayAddress(one.name, Endpoint.parse(one.relay)) for one in found.relays)
        return ToldList(relays, reply.header("etag") or "" if relays else "", now_s)

    def route(self, descriptor: Descriptor, *, divides: bool) -> AnsweredRoute | None:
        """A reserved route, to be ended by `done`; None where the service is away, has none, or
        does not know this engine.
        """
        if not self._worker:
            return None
        body = msgspec.json.encode(self._route_request(descriptor, divides=divides))
        asked = GatewayRequest("POST", "/v1/route", body=(body,), repeatable=False)
        read = partial(self._reserved, len(descriptor.chunk_keys), divides)
        return self._replicas.call(ROUTE, asked, ROUTE_ANSWER_S, self._blamed, read)

    def _route_request(self, descriptor: Descriptor, *, divides: bool) -> RouteRequest:
        count = len(descriptor.chunk_keys)
        layers = descriptor.end_layer - descriptor.first_layer
        slice_bytes = descriptor.per_layer_chunk_bytes
        return RouteRequest(
            name=f"fetch-{uuid.uuid4().hex}",
            cached_tokens=count * descriptor.chunk_tokens,
            new_tokens=descriptor.computed_tokens or 1,
            layer_bytes=count * slice_bytes,
            num_layers=layers,
            compute_window_s=descriptor.compute_window_s,
            chunk_bytes=layers * slice_bytes if divides else 0,
            prefill=self._worker,
        )

    def _reserved(
        self, chunk_count: int, divides: bool, replica: DispatchReplica, reply: Reply
    ) -> AnsweredRoute:
        reservation = read_json(reply.body, _Reservation)
        end = partial(self._end, replica, reservation.name)
        try:
            reservation.check(chunk_count, divides=divides)
        except InvalidRequest:
            self._threads.start(end)
            raise
        return AnsweredRoute(reservation.parts, lambda: self._threads.start(end))

    def _end(self, replica: DispatchReplica, name: str) -> None:
        """A reservation is ended where it was made."""
        asked = GatewayRequest("POST", f"/v1/reservations/{name}/complete", repeatable=False)
        self._replicas.call_one(
            replica, END, asked, ANSWER_S, self._blamed, _taken, may_be_gone=True
        )

    def _blamed(self, error: Exception) -> str:
        """The argument that the service did not take."""
        if isinstance(error, AccessDenied):
            return ", dispatch_token"
        if isinstance(error, InvalidRequest) and self._worker and self._worker in error.message:
            return f", worker {self._worker!r}"
        return ""

    def close(self) -> None:
        """End the connections. Repeating has no effect."""
        self._replicas.close()

    def __repr__(self) -> str:
        return f"<DispatchClient {self._replicas!r}>"


def _taken(_: DispatchReplica, reply: Reply) -> bool:
    """Whatever it says: it was heard."""
    return True
