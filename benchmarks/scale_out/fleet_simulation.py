"""Engines that get and put prefixes by way of gateways, on servers that share one log.

A request is prefilled by one engine: it matches at a server what that server's index knows, gets
it, computes the rest meanwhile, and puts whole blocks that were not stored. An engine's session
stays with its server; some requests come without a target, and go where the gateway sends them.
When a server is lost whatever was under way there begins again elsewhere.
"""

from __future__ import annotations

import math
import random
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from benchmarks.scale_out.choosing_gateway import ChoosingGateway, ServerFacts
from benchmarks.scale_out.index_costs import IndexCosts
from benchmarks.scale_out.prefill_requests import PrefillRequest
from benchmarks.scale_out.shared_pipe import SharedPipe
from benchmarks.scale_out.simulated_log import Change, CommitLog, LogServer, StoreTimes
from benchmarks.scale_out.virtual_clock import VirtualClock
from objectcache_gateway.storage.follow_servers import ASK_INTERVAL_S
from objectcache_gateway.storage.known_server import KnownServer
from objectcache_schemas.limits import KIB
from objectcache_storage_server.admission.recent_bytes import RecentBytes
from objectcache_storage_server.conversations.spread_sessions import (
    asking_interval_s,
    session_to_ask,
)
from objectcache_storage_server.engines.shared.log.log_catalog import HEARTBEAT_S
from objectcache_storage_server.engines.shared.log.writers.heartbeats import USED_EXTENTS_MAX
from objectcache_storage_server.scheduling.windows.compute_profile import ComputeProfile
from objectcache_storage_server.simulation.mix import read_mix
from objectcache_storage_server.simulation.mooncake import BLOCK_TOKENS

LAYERS = 32
TOKEN_BYTES = LAYERS * 4 * KIB  # Llama 3.1 8B
BLOCKS_PER_EXTENT = 2  # a row of 4 MiB holds 1,024 tokens of a layer, however they are cut
JOIN_S = 5.0  # in which all engines join
NOTICED_S = 0.1  # until an engine joins another server
LONGER = 3.0  # times the planned seconds, after which what has not ended is given up
BYTES_PER_GBIT = 1e9 / 8


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """What is simulated."""

    servers: int
    engines: int
    chunk_tokens: int  # G
    seconds: float
    costs: IndexCosts
    gateways: int = 16
    times: StoreTimes = field(default_factory=StoreTimes)
    link_gbps: float = 200.0  # of a server, in each direction
    free_share: float = 0.25  # of the requests: without a target
    lost_at_s: float | None = None
    added_at_s: float | None = None
    seed: int = 0


class Server(ServerFacts):
    """A storage server: its link, its index, and what it has carried."""

    def __init__(self, name: str, clock: VirtualClock, log: CommitLog, link_gbps: float) -> None:
        super().__init__(name)
        bytes_per_s = link_gbps * BYTES_PER_GBIT
        self.out = SharedPipe(clock, bytes_per_s)
        self.into = SharedPipe(clock, bytes_per_s)
        self.index = LogServer(log, int(name))
        self.used_extents: set[int] = set()
        self.bound_bytes = 0.0  # of sessions
        self.free_bytes = 0.0
        self.joined: dict[Engine, None] = {}  # the oldest first
        self.told_sessions = 0  # by its last heartbeat, to the other servers
        self._clock = clock
        self._recent = RecentBytes()
        self._under_way: dict[object, Callable[[], None]] = {}

    @property
    def sessions(self) -> int:
        return len(self.joined)

    @property
    def load(self) -> int:
        return len(self._under_way)

    @property
    def recent(self) -> tuple[int, float]:
        return self._recent.at(self._clock.now_s)

    def begin(self, name: object, size_bytes: int, lost: Callable[[], None]) -> None:
        """A get or put is under way; `lost` is called where the server is lost before its end."""
        self._recent.add(size_bytes, self._clock.now_s)
        self._under_way[name] = lost

    def end(self, name: object) -> bool:
        """It has ended here; false where it was lost."""
        return self._under_way.pop(name, None) is not None

    def lose(self) -> None:
        """It is gone, with all that is under way."""
        self.is_lost = self.index.is_lost = True
        lost, self._under_way = self._under_way, {}
        for call in lost.values():
            call()

    def carried(self, size_bytes: float, *, is_free: bool) -> None:
        """A get or put is through."""
        if is_free:
            self.free_bytes += size_bytes
        else:
            self.bound_bytes += size_bytes


@dataclass(slots=True, eq=False)
class Serving:
    """One request on its way."""

    request: PrefillRequest
    is_free: bool
    matched: int = 0  # blocks, by the last try
    parts_left: int = 2  # the get and the computation
    served: int = 0  # times that its engine was through with it
    stored: int = 0  # times that its put was acknowledged, or had nothing to store


class Engine:
    """Prefills one request after the other."""

    def __init__(self, number: int, gateway: ChoosingGateway) -> None:
        self.number = number
        self.gateway = gateway
        self.server: Server | None = None
        self.line: deque[Serving] = deque()
        self.busy_s = 0.0
        self.began_s = 0.0
        self.is_busy = False
        self.asked_to_move_s = -math.inf  # of its session
        self.running = 0  # gets and puts over its session

    @property
    def is_local(self) -> bool:
        """Its session goes through a gateway."""
        return False

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs over its session."""
        return not self.running

    @property
    def outstanding(self) -> int:
        """Requests that it has."""
        return len(self.line) + self.is_busy


@dataclass(frozen=True, slots=True)
class Evenness:
    """Of the servers that were there at a phase's end: what the most has, and the least, over the
    mean.
    """

    most: float
    least: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Evenness:
        """Even where there is nothing."""
        mean = sum(values) / len(values)
        return cls(max(values) / mean, min(values) / mean) if mean else cls(1.0, 1.0)


@dataclass(frozen=True, slots=True)
class Phase:
    """Between two events."""

    name: str
    sessions: Evenness  # at its end
    bound: Evenness  # bytes of sessions' gets and puts
    free: Evenness  # of those without a target
    both: Evenness


@dataclass
class Outcome:
    """What came of it."""

    servings: list[Serving]
    servers: list[Server]
    log: CommitLog
    engines: list[Engine]
    phases: list[Phase] = field(default_factory=list)
    put_s: array[float] = field(default_factory=lambda: array("d"))  # from the prefill's end
    get_s: array[float] = field(default_factory=lambda: array("d"))
    retries: int = 0
    moves: int = 0  # of sessions that were asked to
    unseen_blocks: int = 0  # stored, and not replayed where they were looked for
    matched_blocks: int = 0
    ended_s: float = 0.0
    open: int = 0  # requests that had not come to their end
    ready_after_s: float | None = None  # of the server that was added


class FleetSimulation:
    """Runs one plan; within a running event loop, which gateways ask for the time."""

    def __init__(self, plan: FleetPlan, requests: Sequence[PrefillRequest]) -> None:
        self._plan = plan
        self._clock = VirtualClock()
        self._profile: ComputeProfile = read_mix(None).profile
        chunks_per_block = BLOCK_TOKENS // plan.chunk_tokens
        store_chooser = random.Random(f"store {plan.seed}")
        self._log = CommitLog(self._clock, plan.times, plan.costs, chunks_per_block, store_chooser)
        self._servers: list[Server] = []  # all that were ever ready
        self._chooser = random.Random(f"fleet {plan.seed}")
        for _ in range(plan.servers):
            self._ready(self._made_server())
        self._gateways = [self._made_gateway(number) for number in range(plan.gateways)]
        self._engines = [
            Engine(number, self._gateways[number % plan.gateways]) for number in range(plan.engines)
        ]
        servings = [Serving(one, self._chooser.random() < plan.free_share) for one in requests]
        self._outcome = Outcome(servings, self._servers, self._log, self._engines)
        self._outcome.open = len(servings)
        self._carried_then: dict[str, tuple[float, float]] = {}  # when the phase began
        self._is_over = False

    def run(self) -> Outcome:
        """Until every request has come to its end and every server has replayed all; where that
        takes LONGER than planned, until then.
        """
        plan, clock, outcome = self._plan, self._clock, self._outcome
        for engine in self._engines:
            clock.at(JOIN_S * engine.number / plan.engines, partial(self._join, engine))
        for number, gateway in enumerate(self._gateways):
            gateway.hear(self._servers)
            clock.at(ASK_INTERVAL_S * (number + 1) / plan.gateways, partial(self._ask, gateway))
        for serving in outcome.servings:
            clock.at(JOIN_S + serving.request.at_s, partial(self._arrive, serving))
        if plan.lost_at_s is not None:
            clock.at(plan.lost_at_s, self._lose)
        if plan.added_at_s is not None:
            clock.at(plan.added_at_s, self._add)
        clock.run(lambda: outcome.open > 0 and clock.now_s < JOIN_S + LONGER * plan.seconds)
        outcome.ended_s = clock.now_s
        self._end_phase("end")
        self._is_over = True
        if not outcome.open:
            clock.run()
        for gateway in self._gateways:
            gateway.close()
        return outcome

    # --- servers and gateways ---

    def _made_server(self) -> Server:
        name = f"{len(self._servers) + 1:08d}"
        return Server(name, self._clock, self._log, self._plan.link_gbps)

    def _ready(self, server: Server) -> None:
        self._servers.append(server)
        begins_s = HEARTBEAT_S * self._chooser.random()
        self._clock.after(begins_s, partial(self._beat, server, -1))
        self._clock.after(begins_s, partial(self._spread, server))

    def _made_gateway(self, number: int) -> ChoosingGateway:
        chooser = random.Random(f"gateway {number} {self._plan.seed}")
        return ChoosingGateway(self._servers, chooser)

    def _ask(self, gateway: ChoosingGateway) -> None:
        if not self._is_over:
            gateway.hear(self._servers)
            self._clock.after(ASK_INTERVAL_S, partial(self._ask, gateway))

    def _beat(self, server: Server, seen: int) -> None:
        """A heartbeat, where extents were read or nothing was appended since the last look."""
        if self._is_over or server.is_lost:
            return
        server.told_sessions = server.sessions
        used, server.used_extents = min(len(server.used_extents), USED_EXTENTS_MAX), set()
        appended = server.index.appended
        if used or appended == seen:
            server.index.commit(Change(self._clock.now_s, _nothing, used=max(1, used)))
        self._clock.after(HEARTBEAT_S, partial(self._beat, server, appended))

    def _spread(self, server: Server) -> None:
        """Ask a session to move, where there are too many."""
        if self._is_over or server.is_lost:
            return
        others = [one for one in self._servers if one is not server and not one.is_lost]
        told = [one.told_sessions for one in others]
        engine = session_to_ask(server.joined, told, [], self._clock.now_s)
        if engine is not None:
            engine.asked_to_move_s = self._clock.now_s
        self._clock.after(asking_interval_s(1 + len(others)), partial(self._spread, server))

    def _lose(self) -> None:
        self._end_phase("before the loss")
        living = [one for one in self._servers if not one.is_lost]
        lost = living[len(living) // 2]
        lost.lose()
        for engine in self._engines:
            if engine.server is lost:
                self._clock.after(NOTICED_S, partial(self._join_again, engine))

    def _add(self) -> None:
        self._end_phase("after the loss")
        begun_s = self._clock.now_s
        server = self._made_server()

        def look() -> None:
            if server.index.caught_up_s is None:
                self._clock.after(0.01, look)
                return
            self._outcome.ready_after_s = self._clock.now_s - begun_s
            self._ready(server)

        self._clock.after(0.01, look)

    def _end_phase(self, name: str) -> None:
        living = [one for one in self._servers if not one.is_lost]
        before = [self._carried_then.get(one.name, (0.0, 0.0)) for one in living]
        bound = [one.bound_bytes - then[0] for one, then in zip(living, before, strict=True)]
        free = [one.free_bytes - then[1] for one, then in zip(living, before, strict=True)]
        self._carried_then = {one.name: (one.bound_bytes, one.free_bytes) for one in living}
        sessions = [float(one.sessions) for one in living]
        both = [one + other for one, other in zip(bound, free, strict=True)]
        self._outcome.phases.append(Phase(name, *map(Evenness.of, (sessions, bound, free, both))))

    # --- sessions ---

    def _join(self, engine: Engine) -> None:
        if engine.server is not None:
            del engine.server.joined[engine]
        engine.server = self._server_of(engine.gateway.choose_for_session())
        engine.server.joined[engine] = None
        engine.asked_to_move_s = -math.inf

    def _join_again(self, engine: Engine) -> None:
        if engine.server is not None and engine.server.is_lost:
            self._join(engine)

    def _server_of(self, known: KnownServer) -> Server:
        return self._servers[int(known.name) - 1]

    def _server_for(self, serving: Serving, engine: Engine) -> tuple[Server, Callable[[], None]]:
        """Who is asked, and what to call at the end."""
        if serving.is_free:
            known = engine.gateway.choose()
            return self._server_of(known), partial(engine.gateway.release, known)
        self._join_again(engine)
        if engine.asked_to_move_s >= 0:
            self._join(engine)
            self._outcome.moves += 1
        assert engine.server is not None, "requests come after engines have joined"
        engine.running += 1
        return engine.server, partial(_run_ended, engine)

    # --- requests ---

    def _arrive(self, serving: Serving) -> None:
        count = min(2, len(self._engines))
        engine = min(self._chooser.sample(self._engines, count), key=lambda one: one.outstanding)
        engine.line.append(serving)
        self._take_next(engine)

    def _take_next(self, engine: Engine) -> None:
        if engine.is_busy or not engine.line:
            return
        serving = engine.line.popleft()
        engine.is_busy, engine.began_s = True, self._clock.now_s
        self._get(serving, engine)
        request = serving.request
        window_s = self._profile.window_s(request.tokens, serving.matched * BLOCK_TOKENS)
        self._clock.after(LAYERS * window_s, partial(self._part_ended, serving, engine))

    def _get(self, serving: Serving, engine: Engine) -> None:
        server, release = self._server_for(serving, engine)
        began_s = self._clock.now_s
        serving.matched = matched = self._match(serving.request, server)
        size_bytes = matched * BLOCK_TOKENS * TOKEN_BYTES

        def lost() -> None:
            release()
            self._outcome.retries += 1
            self._clock.after(NOTICED_S, partial(self._get, serving, engine))

        def ended() -> None:
            if server.end(("get", serving)):
                release()
                server.carried(size_bytes, is_free=serving.is_free)
                self._outcome.get_s.append(self._clock.now_s - began_s)
                self._part_ended(serving, engine)

        server.begin(("get", serving), size_bytes, lost)
        server.out.carry(size_bytes, ended)

    def _match(self, request: PrefillRequest, server: Server) -> int:
        """Blocks at its beginning that this server knows; one token at least is computed."""
        most = min(len(request.blocks), (request.tokens - 1) // BLOCK_TOKENS)
        matched = 0
        while matched < most and server.index.knows(request.blocks[matched]):
            matched += 1
        if len(server.used_extents) < USED_EXTENTS_MAX:
            server.used_extents.update(one // BLOCKS_PER_EXTENT for one in request.blocks[:matched])
        self._outcome.matched_blocks += matched
        unseen = matched
        while unseen < most and self._log.is_readable(request.blocks[unseen]):
            unseen += 1
        self._outcome.unseen_blocks += unseen - matched
        return matched

    def _part_ended(self, serving: Serving, engine: Engine) -> None:
        serving.parts_left -= 1
        if serving.parts_left:
            return
        serving.served += 1
        engine.is_busy = False
        engine.busy_s += self._clock.now_s - engine.began_s
        self._put(serving, engine, self._clock.now_s)
        self._take_next(engine)

    def _put(self, serving: Serving, engine: Engine, began_s: float) -> None:
        blocks = serving.request.blocks[serving.matched :]
        if not blocks:
            self._stored(serving)
            return
        server, release = self._server_for(serving, engine)
        size_bytes = len(blocks) * BLOCK_TOKENS * TOKEN_BYTES

        def lost() -> None:
            release()
            self._outcome.retries += 1
            self._clock.after(NOTICED_S, partial(self._put, serving, engine, began_s))

        def staged() -> None:
            if not server.is_lost:
                server.index.commit(Change(self._clock.now_s, committed, blocks))

        def committed() -> None:
            if server.end(("put", serving)):
                release()
                server.carried(size_bytes, is_free=serving.is_free)
                self._outcome.put_s.append(self._clock.now_s - began_s)
                self._stored(serving)

        server.begin(("put", serving), size_bytes, lost)
        server.into.carry(size_bytes, staged)

    def _stored(self, serving: Serving) -> None:
        serving.stored += 1
        self._outcome.open -= 1


def _run_ended(engine: Engine) -> None:
    engine.running -= 1


def _nothing() -> None:
    """For what needs no end."""
