"""The relays of one client, and the route of each of its deliveries."""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from objectcache.channel.access_key import SigningKey
from objectcache.channel.endpoint import Endpoint
from objectcache.core import ClientCore, CoreSettings
from objectcache.routes.accounts import DirectAccount, RelayAccount, RouteLoad
from objectcache.routes.awaited_bytes import AwaitedBytes
from objectcache.routes.dispatch_client import AnsweredRoute, DispatchClient
from objectcache.routes.dispatch_replicas import DispatchReplicas
from objectcache.routes.relay_reports import RelayReports
from objectcache.routes.relays_to_ask import ASKED_MAX, asking_order, relays_to_ask
from objectcache.routes.route_choice import (
    LEAST_LATENESS,
    RATE_UNKNOWN_BYTES_PER_S,
    SPLIT,
    choose_way,
)
from objectcache.routes.route_settings import (
    RELAYS_MAX,
    AskedRoute,
    RelayAddress,
    RouteSettings,
)
from objectcache.thread_reserve import ThreadReserve
from objectcache_dispatch import DispatchRequest
from objectcache_schemas.descriptor import Descriptor
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.operators.relay_report import RelayReport

RELAY_CALL_S = 2.0  # for joining a relay's session, and for registering memory with it
SILENCE_S_MIN = 0.5
SILENCE_UNKNOWN_S = 2.0  # at least, of a relay whose rate nobody knows: its link may be slow
SILENCE_FACTOR = 2.0  # of the time that was predicted
DIRECT, OTHER = "direct", "other"
COUNTED_MAX = 1024  # routes with their reasons; relays come and go, and further ones count as other

ASKED_FOR, SMALL, NO_REPORTS, LEAST_LATE = "asked for", "small", "no relay reports", "least late"
DISPATCHED, UNKNOWN = "the dispatch service's choice", "the relay has not registered"
LEFT_ALONE, UNDIVIDED = "the relay is left alone", "it cannot be divided"

logger = logging.getLogger("objectcache.routes")


@dataclass(eq=False, slots=True)
class RelayLine:
    """One relay, as a client sees it: a server with sessions and connections of its own."""

    address: RelayAddress
    core: ClientCore
    account: RelayAccount
    reports: RelayReports
    is_told_unfit: bool = False  # it was logged that it refuses what is over its limits

    @property
    def word(self) -> str:
        """The route over it."""
        return f"relay:{self.address.node}"

    def close(self) -> None:
        """End its session and connections. Repeating has no effect."""
        self.reports.close()
        self.core.close()

    def __repr__(self) -> str:
        return f"<RelayLine {self.address.node}, {self.core!r}>"


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """How many of a delivery's chunks come over a relay; None: directly."""

    relay: RelayLine | None
    chunk_count: int
    assignment: AwaitedBytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class RoutePlan:
    """What is tried first, in the order of the chunks, and why."""

    parts: tuple[PlannedPart, ...]
    reason: str
    done: Callable[[], None] | None = None  # to be told once, when its delivery has ended

    @property
    def relays(self) -> list[RelayLine]:
        """Those over which parts come."""
        return [part.relay for part in self.parts if part.relay is not None]

    @property
    def is_direct(self) -> bool:
        """Whether no relay is asked."""
        return not self.relays

    def end(self) -> None:
        """Nothing came of it."""
        for part in self.parts:
            part.assignment.end()
        if self.done is not None:
            self.done()

    def follow(self, progress: FollowedDelivery) -> None:
        """Tell whoever chose it when its delivery has ended."""
        done = self.done
        if done is None:
            return

        def heard() -> None:
            if progress.ended:
                done()

        progress.listen(heard)
        heard()


class FollowedDelivery(Protocol):
    """How far a delivery is, as `LayerProgress` says it."""

    @property
    def ended(self) -> bool:
        """Whether nothing will change any more."""
        ...

    def listen(self, listener: Callable[[], None]) -> None:
        """Have it called after every change."""
        ...


class ClientRoutes:
    """Made by a client that has relays. Thread-safe."""

    def __init__(
        self,
        settings: RouteSettings,
        core: CoreSettings,
        access_key: Callable[[], SigningKey],
        tls: ssl.SSLContext | None,
    ) -> None:
        """`core` are the client's own settings, which hold for its relays as far as they can."""
        self.settings = settings
        self._lock = threading.Lock()  # over all accounts
        self._direct = DirectAccount(time.monotonic())
        self._counts: Counter[tuple[str, str]] = Counter()
        call_s = min(core.timeout_s, settings.timeout_s or RELAY_CALL_S)
        self._relay_core = replace(core, timeout_s=call_s, split_from_bytes=0)
        self._access_key, self._tls = access_key, tls
        self._is_closed = False
        self._know([self._open(address) for address in settings.relays])
        self._left: list[RelayLine] = []  # listed no more, while something comes over them
        self._threads = ThreadReserve("objectcache-dispatch")
        self._dispatch: DispatchClient | None = None
        if (source := settings.dispatch) is not None:
            replicas = DispatchReplicas(source.endpoints, source.token, tls)
            self._dispatch = DispatchClient(replicas, source.worker, self._threads, self._listed)
            if settings.route.word != "direct":
                self._dispatch.want()

    def _open(self, address: RelayAddress) -> RelayLine:
        core = ClientCore(address.endpoint, self._access_key, self._relay_core, self._tls)
        account = RelayAccount()
        told, untold = partial(self._reported, account), partial(self._unheard, account)
        reports = RelayReports(core.channel, core.threads, told, untold)
        return RelayLine(address, core, account, reports)

    def _asked(self, now_s: float) -> list[RelayLine]:
        """The relays that are asked how busy they are, and chosen by it: of those that are not left
        alone, and answer, so that others stand in for them. Such as gave no report when they were
        asked last are asked beside these, as many again at most, so that it is found when they are
        back.
        """
        asked, doubted = list[RelayLine](), list[RelayLine]()
        for line in self._asking_order:
            if len(asked) == ASKED_MAX:
                break
            account = line.account
            if account.rest_s(now_s) > 0 or account.is_unheard(now_s):
                continue
            if not account.is_doubted:
                asked.append(line)
            elif len(doubted) < ASKED_MAX:
                doubted.append(line)
        return [*asked, *doubted]

    def _know(self, lines: Sequence[RelayLine]) -> None:
        """Under the lock, but for the first: these are the relays."""
        self.lines = list(lines)
        by_name = defaultdict[str, list[RelayLine]](list)
        for line in lines:
            by_name[line.address.node].append(line)
        order = asking_order(self.settings.node, list(by_name))
        self._asking_order = [line for name in order for line in by_name[name]]

    def _listed(self, addresses: Sequence[RelayAddress]) -> None:
        """These relays have registered at the dispatch service. Others are asked for nothing any
        more, and end when nothing comes over them; those that the caller named stay.
        """
        named = {one.node: one for one in addresses}
        nodes = relays_to_ask(self.settings.node, list(named), RELAYS_MAX)
        wanted = {node: named[node] for node in sorted(nodes)}
        wanted.update((one.node, one) for one in self.settings.relays)
        with self._lock:
            if self._is_closed:
                return
            before = [*self.lines, *self._left]
            known = {line.address: line for line in reversed(before)}
            self._know([known.get(one) or self._open(one) for one in wanted.values()])
            others = [line for line in before if line not in self.lines]
            self._left = [line for line in others if line.account.awaited_bytes > 0]
            gone = [line for line in others if line not in self._left]
        for line in gone:
            line.close()

    def _reported(self, account: RelayAccount, report: RelayReport, asked_s: float) -> None:
        with self._lock:
            account.reported(report, asked_s)

    def _unheard(self, account: RelayAccount) -> bool:
        with self._lock:
            return account.untold(time.monotonic())

    def checked(self, asked: AskedRoute) -> AskedRoute:
        """Raises `InvalidRequest` for a relay that there is not; the dispatch service may know of
        one later.
        """
        if asked.relay and self._dispatch is None:
            self._line(asked.relay)
        return asked

    def route_over(self, relay: str) -> str | None:
        """See `Client.route_over`."""
        with self._lock:
            line = self._known(relay)
            is_usable = line is not None and line.account.may_be_tried(time.monotonic())
        if line is None and self._dispatch is not None:
            self._dispatch.want()  # it may have registered; a later hint finds it
        return line.word if line is not None and is_usable else None

    def is_split(self, asked: AskedRoute | None) -> bool:
        """Whether this route, by default the client's, divides deliveries."""
        return (asked or self.settings.route).word == "split"

    # --- plans ---

    def plan(self, asked: AskedRoute | None, descriptor: Descriptor, *, divides: bool) -> RoutePlan:
        """The route of a delivery, which may come in parts where it `divides`. Its bytes count from
        now on: it is carried out, or ended.
        """
        asked = self.settings.route if asked is None else asked
        is_chosen = asked.word in ("auto", "split") and not self._is_small(descriptor)
        answered = None
        if self._dispatch is not None and (is_chosen or asked.word in ("relay", "split")):
            self._dispatch.want()
            may_ask = is_chosen and (divides or asked.word == "auto")
            answered = self._dispatch.route(descriptor, divides=divides) if may_ask else None
        plan = None if answered is None else self._dispatched(answered, descriptor)
        if plan is None:
            plan, wanted = self._own_plan(asked, descriptor, divides, asks=is_chosen)
        else:
            wanted = plan.relays
        for line in wanted:
            line.reports.want()
        return plan

    def _dispatched(self, answered: AnsweredRoute, descriptor: Descriptor) -> RoutePlan | None:
        """By the dispatch service's choice. It hears at once where nothing comes of that."""
        with self._lock:
            now_s = time.monotonic()
            relays = self._told(answered, descriptor, now_s)
            if relays is not None:
                plan = self._assigned(relays, DISPATCHED, descriptor, now_s)
                return replace(plan, done=_once(answered.done))
        answered.done()
        return None

    def _own_plan(
        self, asked: AskedRoute, descriptor: Descriptor, divides: bool, *, asks: bool
    ) -> tuple[RoutePlan, list[RelayLine]]:
        """By what this client knows, and the relays whose reports are wanted: where it `asks`,
        those by which it chooses.
        """
        with self._lock:
            awaited = self._asked(time.monotonic()) if asks else []
        self._await_reports(awaited)
        with self._lock:
            now_s = time.monotonic()
            relays, reason = self._chosen(asked, descriptor, divides, now_s)
            plan = self._assigned(relays, reason, descriptor, now_s)
            return plan, self._asked(now_s) if asks else plan.relays

    def _await_reports(self, asked: Sequence[RelayLine]) -> None:
        """Relays of which nothing was asked for long are asked first, all at the same time."""
        lines = [line for line in asked if not self._is_own(line)]
        for line in lines:
            line.reports.want()
        for line in lines:
            if not line.account.is_doubted:
                line.reports.wait_first()

    def _told(
        self, answered: AnsweredRoute, descriptor: Descriptor, now_s: float
    ) -> list[tuple[RelayLine | None, int]] | None:
        """The dispatch service's choice; None where it names none, or a relay that has no URL, is
        left alone by this client, or drains: the service hears from the relay alone.
        """
        relays = list[tuple[RelayLine | None, int]]()
        for part in answered.parts:
            line: RelayLine | None = None
            if part.relay is not None:
                line = self._named(part.relay, part.relay_url or "")
                if line is None or not line.account.may_be_tried(now_s):
                    return None
            relays.append((line, part.chunk_count or len(descriptor.chunk_keys)))
        return relays or None

    def _named(self, node: str, url: str) -> RelayLine | None:
        """A relay that the service names, which it need not have listed yet."""
        line = self._known(url)
        if line is not None or self._is_closed or len(self.lines) >= RELAYS_MAX:
            return line
        with suppress(InvalidRequest):
            address = RelayAddress(node, Endpoint.parse(url))
            line = next((one for one in self._left if one.address == address), None)
            if line is None:
                line = self._open(address)
            else:
                self._left.remove(line)
            self._know([line, *self.lines])
        return line

    def _chosen(
        self, asked: AskedRoute, descriptor: Descriptor, divides: bool, now_s: float
    ) -> tuple[list[tuple[RelayLine | None, int]], str]:
        chunk_count = len(descriptor.chunk_keys)
        directly: list[tuple[RelayLine | None, int]] = [(None, chunk_count)]
        match asked.word:
            case "direct":
                return directly, ASKED_FOR
            case "relay":
                line = self._known(asked.relay)
                if line is None:
                    return directly, UNKNOWN
                if line.account.rest_s(now_s) > 0:
                    return directly, LEFT_ALONE
                return [(line, chunk_count)], ASKED_FOR
            case "split":
                if not divides:
                    return directly, UNDIVIDED
                return self._by(
                    SPLIT, descriptor, self._loads(now_s, lenient=True), now_s
                ), ASKED_FOR
            case _:
                if self._is_small(descriptor):
                    return directly, SMALL
                loads = self._loads(now_s)
                if not loads:
                    return directly, NO_REPORTS
                return self._by(LEAST_LATENESS, descriptor, loads, now_s), LEAST_LATE

    def _is_small(self, descriptor: Descriptor) -> bool:
        return descriptor.payload_bytes(len(descriptor.chunk_keys)) < self.settings.bytes_min

    def _by(
        self, policy: str, descriptor: Descriptor, loads: dict[str, RouteLoad], now_s: float
    ) -> list[tuple[RelayLine | None, int]]:
        count = len(descriptor.chunk_keys)
        layers = descriptor.end_layer - descriptor.first_layer
        fetch = DispatchRequest(
            "fetch",
            count * descriptor.chunk_tokens,
            1,
            descriptor.payload_bytes(count),
            count * descriptor.per_layer_chunk_bytes,
            layers,
            descriptor.compute_window_s,
            chunk_bytes=layers * descriptor.per_layer_chunk_bytes if policy == SPLIT else 0,
        )
        own_bytes = sum(
            line.account.read_queue_bytes(now_s) for line in self.lines if self._is_own(line)
        )
        route = choose_way(fetch, self._direct.load(now_s, own_bytes), loads, policy)
        return [
            (None if part.relay is None else self._line(part.relay), part.chunk_count or count)
            for part in route.parts
        ]

    def _loads(self, now_s: float, *, lenient: bool = False) -> dict[str, RouteLoad]:
        """Of relays that can be chosen; `lenient` takes those of which nothing is known, too."""
        loads = dict[str, RouteLoad]()
        for line in self._asked(now_s):
            if self._is_own(line):
                continue
            load = line.account.load(now_s)
            if load is None and lenient and line.account.may_be_tried(now_s):
                load = RouteLoad(line.account.awaited_bytes, None, float("inf"))
            if load is not None:
                loads.setdefault(line.address.node, load)  # of what it is called now
        return loads

    def _is_own(self, line: RelayLine) -> bool:
        """Whether it is this node's own relay, over whose NIC direct deliveries come, too."""
        return line.address.node == self.settings.node

    def _assigned(
        self,
        relays: Sequence[tuple[RelayLine | None, int]],
        reason: str,
        descriptor: Descriptor,
        now_s: float,
    ) -> RoutePlan:
        parts = tuple(
            PlannedPart(line, count, self._assign(line, descriptor.payload_bytes(count), now_s))
            for line, count in relays
        )
        first = relays[0][0]
        kind = SPLIT if len(relays) > 1 else DIRECT if first is None else first.word
        self._count(kind, reason)
        return RoutePlan(parts, reason)

    def assign(self, line: RelayLine | None, length_bytes: int) -> AwaitedBytes:
        """So much is asked for over a relay, or directly, that was planned otherwise."""
        with self._lock:
            return self._assign(line, length_bytes, time.monotonic())

    def _assign(self, line: RelayLine | None, length_bytes: int, now_s: float) -> AwaitedBytes:
        if line is None:
            return AwaitedBytes(self._lock, self._direct, length_bytes, 0.0, now_s)
        load = line.account.load(now_s)
        queue_bytes = line.account.awaited_bytes if load is None else load.queue_bytes
        return AwaitedBytes(self._lock, line.account, length_bytes, queue_bytes, now_s)

    def others(self, than: Sequence[RelayLine | None]) -> list[RelayLine]:
        """Relays that may be asked where these failed."""
        with self._lock:
            now_s = time.monotonic()
            return [
                line
                for line in self._asked(now_s)
                if line not in than and line.account.may_be_tried(now_s) and not self._is_own(line)
            ]

    def silence_s(
        self,
        line: RelayLine,
        payload_bytes: int,
        layer_bytes: int,
        rate_bytes_per_s: float | None,
        window_s: float | None,
    ) -> float:
        """How long a relay may bring nothing of a delivery whose rate is at most so much, and of
        which a layer computes for so long.
        """
        if self.settings.timeout_s is not None:
            return self.settings.timeout_s
        with self._lock:
            now_s = time.monotonic()
            load = line.account.load(now_s)
            queue_bytes = line.account.awaited_bytes if load is None else load.queue_bytes
            rate = line.account.rate_bytes_per_s(now_s)
        least_s = SILENCE_S_MIN if rate else SILENCE_UNKNOWN_S
        known_bytes_per_s = rate or RATE_UNKNOWN_BYTES_PER_S
        predicted_s = max((queue_bytes + payload_bytes) / known_bytes_per_s, window_s or 0.0)
        if rate_bytes_per_s:
            predicted_s = max(predicted_s, layer_bytes / rate_bytes_per_s)
        return max(least_s, SILENCE_FACTOR * predicted_s)

    def moved_s(self, line: RelayLine) -> float:
        """When the relay is known to have moved bytes last, of any delivery or client, by
        time.monotonic. Its reports tell that of others', and go on being read.
        """
        line.reports.want()
        with self._lock:
            return line.account.moved_s

    # --- what became of them ---

    def failed(self, line: RelayLine, what: str, why: str) -> None:
        """A relay `what` (failed, or refused), for which another relay need not be to blame."""
        with self._lock:
            now_s = time.monotonic()
            is_left_alone = line.account.failed(now_s)
            rest_s = line.account.rest_s(now_s)
            self._count(line.word, what)
        if is_left_alone:
            logger.warning("%s %s: %s; it is left alone for %g s", line.word, what, why, rest_s)
        else:
            logger.info("%s %s: %s", line.word, what, why)

    def silent(self, line: RelayLine, since_s: float, why: str) -> None:
        """A relay was waited for in vain, since then. It is left alone at once, so that nothing
        else waits for it, unless it has moved others' bytes meanwhile.
        """
        with self._lock:
            now_s = time.monotonic()
            is_left_alone = line.account.moved_s < since_s and line.account.silent(now_s)
            rest_s = line.account.rest_s(now_s)
        if is_left_alone:
            logger.warning("%s is silent: %s; it is left alone for %g s", line.word, why, rest_s)

    def is_left_alone(self, line: RelayLine) -> bool:
        """Whether it is to be asked for nothing now."""
        with self._lock:
            return line.account.rest_s(time.monotonic()) > 0

    def was_unfit(self, line: RelayLine, why: str) -> None:
        """A relay refused what is over one of its limits, or is no request: no failure of its own,
        but every such delivery asks it in vain.
        """
        with self._lock:
            self._count(line.word, "refused")
            is_told, line.is_told_unfit = line.is_told_unfit, True
        if not is_told:
            logger.warning("%s refused: %s; further ones are only counted", line.word, why)

    def was_busy(self, line: RelayLine) -> None:
        """A relay had no room, which is no failure."""
        with self._lock:
            self._count(line.word, "was busy")

    def _count(self, word: str, what: str) -> None:
        is_kept = (word, what) in self._counts or len(self._counts) < COUNTED_MAX
        self._counts[word if is_kept else OTHER, what] += 1

    def counts(self) -> dict[tuple[str, str], int]:
        """How many deliveries took each route for each reason, and how many had to leave one."""
        with self._lock:
            return dict(self._counts)

    def _known(self, name: str) -> RelayLine | None:
        return next((line for line in self.lines if line.address.is_called(name)), None)

    def _line(self, name: str) -> RelayLine:
        if (line := self._known(name)) is not None:
            return line
        known = ", ".join(line.address.node for line in self.lines) or "none"
        raise InvalidRequest(f"route: there is no relay {name!r}; there are {known}")

    def close(self) -> None:
        """End all sessions and connections with relays. Repeating has no effect."""
        with self._lock:
            self._is_closed = True
        for line in [*self.lines, *self._left]:
            line.close()
        if self._dispatch is not None:
            self._dispatch.close()
        self._threads.close()

    def __repr__(self) -> str:
        return f"<ClientRoutes {len(self.lines)} relays, {self.settings.route}>"


def _once(call: Callable[[], None]) -> Callable[[], None]:
    """The same, which does nothing from the second time on."""
    left = [call]

    def first() -> None:
        with suppress(IndexError):
            left.pop()()

    return first
