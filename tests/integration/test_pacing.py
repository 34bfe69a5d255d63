"""The promise of a rate, on real threads and on real processes.

A machine that is busy can only make deliveries slower, so what may not be exceeded is asserted
always: no thread holds more than one fragment that was granted and is not written. That a rate is
reached is asserted of the best of a few tries, and only where the machine wakes its threads in
time, which is measured in the same run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Self

import numpy as np
import pytest

from objectcache import Client, KvLayout
from objectcache_schemas.descriptor import DeliveryMode, Descriptor
from objectcache_schemas.limits import KIB
from objectcache_schemas.operators.schedule import ScheduleChanges
from objectcache_schemas.operators.traces import DeliveryTrace
from objectcache_schemas.policy_names import FOR_LIFE, PolicyName
from objectcache_schemas.records import BucketInfo
from objectcache_storage_server.deliveries.delivery import DeliveryState, ServedDelivery
from objectcache_storage_server.deliveries.dispatcher import Dispatcher
from objectcache_storage_server.deliveries.plan import plan_chunks
from objectcache_storage_server.engines.base import Engine, StagedPut
from objectcache_storage_server.engines.memory.engine import MemoryEngine
from objectcache_storage_server.scheduling.demand import Demand
from objectcache_storage_server.scheduling.lanes.delivery_flow import Flow
from objectcache_storage_server.scheduling.scheduler import LINK_CATCH_UP_S, Scheduler
from objectcache_storage_server.transports.memory import MemoryTransport
from tests.integration.scheduling_load import (
    BYTES_PER_GBIT,
    Fetching,
    Prefix,
    ScheduledServer,
    stored_prefix,
)
from tests.integration.served import BOUND_S, wait_until
from tests.schedules import a_configuration, a_recorder

CAP_GBPS = 0.2
CAP_BYTES_PER_S = CAP_GBPS * BYTES_PER_GBIT
MARGIN_GBPS = 0.01
READERS = 2
WINDOW_S = 0.2
OVER_CAP = 1.02
SLOWEST, FASTEST = 0.9, 1.1  # of the assigned rate: only a broken pacer is beyond
TRIES = 3
LOST_MAX = 0.02  # of the time, by threads that wake late, on a machine that can keep to rates
POLICIES: list[PolicyName] = ["equal", "kv_prop", "calibrated_stall_opt"]


class Stamp(NamedTuple):
    """So many bytes were in place then."""

    at_s: float
    length_bytes: int


class Achieved(NamedTuple):
    """A delivery's rate over its life; both in bytes per second."""

    assigned: float
    achieved: float


class Wakeups:
    """How much of the time of a `with` block was lost to threads that were woken late."""

    def __init__(self) -> None:
        self._lost_s = self._slept_s = 0.0
        self._stopping = False
        self._thread = threading.Thread(target=self._run)

    @property
    def lost(self) -> float:
        """A fraction: what a link that is paced by such a thread cannot catch up."""
        return self._lost_s / self._slept_s if self._slept_s else 1.0

    def _run(self) -> None:
        asleep_s = 0.001
        while not self._stopping:
            begun_s = time.monotonic()
            time.sleep(asleep_s)
            slept_s = time.monotonic() - begun_s
            self._slept_s += slept_s
            self._lost_s += max(0.0, slept_s - asleep_s - LINK_CATCH_UP_S)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        self._thread.join()


def busiest_window_bytes(stamps: Sequence[Stamp]) -> int:
    """The most that came within any WINDOW_S."""
    ordered = sorted(stamps)
    most = total = first = 0
    for stamp in ordered:
        total += stamp.length_bytes
        while ordered[first].at_s < stamp.at_s - WINDOW_S:
            total -= ordered[first].length_bytes
            first += 1
        most = max(most, total)
    return most


def check_window(stamps: Sequence[Stamp]) -> None:
    """The cap holds in every window: over it is the fragment that each reader may hold."""
    most = OVER_CAP * CAP_BYTES_PER_S * WINDOW_S + READERS * max(stamps, key=_length).length_bytes
    assert busiest_window_bytes(stamps) <= most


def _length(stamp: Stamp) -> int:
    return stamp.length_bytes


def check_rates(run: Callable[[], list[Achieved]], slowest: float = SLOWEST) -> None:
    """Run until every delivery has reached its rate, which a late machine need not let it do."""
    tries: list[str] = []
    losses: list[float] = []
    for _ in range(TRIES):
        with Wakeups() as wakeups:
            rates = run()
        for assigned, achieved in rates:
            assert achieved <= FASTEST * assigned
        reached = [achieved / assigned for assigned, achieved in rates]
        if min(reached) >= slowest:
            return
        tries.append(f"{min(reached):.2f} of a rate with {wakeups.lost:.1%} lost")
        losses.append(wakeups.lost)
    print("; ".join(tries))
    if max(losses) > LOST_MAX:
        pytest.skip(
            f"no rate was exceeded; whether it is reached this machine is too busy to say: {tries}"
        )
    pytest.fail(f"a delivery is slower than its rate: {tries}")


# --- the dispatcher and its threads ---

LAYERS, SLICE_BYTES = 8, 4 * KIB
FRAGMENT_BYTES = 3 * SLICE_BYTES  # half a millisecond of the cap
CHUNK_COUNTS = (96, 160, 256)  # of the deliveries that share the link: together 0.7 s of it
LIFE_S = 0.67  # of each, if the rates went by its bytes


class StampingTransport(MemoryTransport):
    """Notes when each piece was written."""

    def __init__(self, length_bytes: int) -> None:
        super().__init__(length_bytes)
        self.stamps: list[Stamp] = []

    def written(self, offset_bytes: int, length_bytes: int) -> None:
        super().written(offset_bytes, length_bytes)
        self.stamps.append(Stamp(time.monotonic(), length_bytes))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = MemoryEngine()
    engine.create_bucket(BucketInfo(name="b", owner="root", region="", created_s=0.0))
    content = np.random.default_rng(1).bytes(LAYERS * SLICE_BYTES)
    puts: list[StagedPut] = []
    for number in range(max(CHUNK_COUNTS)):
        staged = engine.stage("b", f"k{number}", SLICE_BYTES)
        staged.write_at(0, memoryview(content))
        puts.append(StagedPut(staged, "e"))
    engine.commit(puts)
    yield engine
    engine.close()


class Running:
    """A delivery of the first chunks over a dispatcher."""

    def __init__(self, engine: Engine, dispatcher: Dispatcher, chunk_count: int) -> None:
        keys = tuple(f"k{number}" for number in range(chunk_count))
        mode = DeliveryMode.LAYERWISE
        descriptor = Descriptor(keys, LAYERS, 16, SLICE_BYTES, mode)
        opened = engine.open_many("b", keys)
        plan = plan_chunks(descriptor, opened.placements(), mode, FRAGMENT_BYTES)
        self.transport = StampingTransport(plan.payload_bytes)
        self.ended = threading.Event()
        self._dispatcher = dispatcher
        self.delivery = ServedDelivery(plan, opened, self.transport, self._end, a_recorder())
        self.demand = Demand(chunk_count * SLICE_BYTES, LIFE_S / LAYERS, LAYERS)

    def _end(self, delivery: ServedDelivery) -> None:
        self._dispatcher.remove(delivery)
        self.ended.set()

    def add(self, scheduler: Scheduler[ServedDelivery]) -> Flow[ServedDelivery]:
        """Under the dispatcher's lock, so that all wait for the same epoch."""
        scheduler.add(self.delivery, self.demand, time.monotonic(), pooled=True)
        flow = scheduler.flow(self.delivery)
        assert flow is not None
        return flow

    def wait(self) -> None:
        assert self.ended.wait(BOUND_S)
        assert self.delivery.state is DeliveryState.COMPLETE
        assert self.transport.written_bytes == self.demand.payload_bytes

    def achieved(self, flow: Flow[ServedDelivery]) -> Achieved:
        """From the moment at which it got its rate."""
        assert flow.rate_bytes_per_s is not None
        elapsed_s = self.transport.stamps[-1].at_s - flow.begun_s
        return Achieved(flow.rate_bytes_per_s, self.demand.payload_bytes / elapsed_s)


def run_together(engine: Engine, policy: PolicyName) -> list[tuple[Running, Flow[ServedDelivery]]]:
    """All deliveries at once, to their ends, with the cap checked."""
    configuration = a_configuration(policy, CAP_GBPS, margin_gbps=MARGIN_GBPS, rates=FOR_LIFE)
    dispatcher = Dispatcher(READERS, Scheduler(configuration, time.monotonic()))
    try:
        all_running = [Running(engine, dispatcher, count) for count in CHUNK_COUNTS]
        flows = dispatcher.with_scheduler(
            lambda scheduler: [running.add(scheduler) for running in all_running]
        )
        for running in all_running:
            running.wait()
    finally:
        dispatcher.close()
    check_window([stamp for running in all_running for stamp in running.transport.stamps])
    return list(zip(all_running, flows, strict=True))


@pytest.mark.parametrize("policy", POLICIES)
def test_threads_keep_to_the_rates_and_to_the_cap(engine: Engine, policy: PolicyName) -> None:
    def run() -> list[Achieved]:
        together = run_together(engine, policy)
        rates = [running.achieved(flow) for running, flow in together]
        assert sum(assigned for assigned, _ in rates) <= CAP_BYTES_PER_S + len(rates)
        return rates

    check_rates(run)


def test_threads_that_go_by_due_time_keep_to_the_cap(engine: Engine) -> None:
    def run() -> list[Achieved]:
        together = run_together(engine, "stall_dynamic")
        ends_s = [running.transport.stamps[-1].at_s for running, _ in together]
        total_bytes = sum(running.demand.payload_bytes for running, _ in together)
        begun_s = min(flow.begun_s for _, flow in together)
        return [Achieved(CAP_BYTES_PER_S, total_bytes / (max(ends_s) - begun_s))]

    check_rates(run)


# --- a server and its clients ---

LAYOUT = KvLayout(  # a chunk's layer is one fragment, which the trace has the time of
    num_layers=384,
    chunk_tokens=16,
    per_layer_chunk_bytes=16 * KIB,
    dtype="float16",
    fingerprint="pacing",
)
ENDS = (384, 256, 160)  # layers of the deliveries that share the link


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScheduledServer]:
    data_dir = tmp_path_factory.mktemp("pacing") / "data"
    with ScheduledServer(data_dir, f"storage.reader_threads={READERS}") as server:
        yield server


@pytest.fixture(scope="module")
def prefix(served: ScheduledServer) -> Iterator[Prefix]:
    with served.client() as client:
        yield stored(client)


def stored(client: Client) -> Prefix:
    return stored_prefix(client, "pacing", 1, LAYOUT)


def traces_together(
    served: ScheduledServer, prefix: Prefix, policy: PolicyName
) -> list[DeliveryTrace]:
    """All deliveries admitted together; the epoch is long until all wait for its end."""
    changes = ScheduleChanges(
        policy=policy, cap_gbps=CAP_GBPS, margin_gbps=MARGIN_GBPS, epoch_s=10, rates=FOR_LIFE
    )
    served.change(changes)

    def fetch(end_layer: int) -> str:
        window_s = LIFE_S / end_layer
        options = {"delivery": "layerwise", "transport": "shared_memory"}
        layers = (0, end_layer)
        with prefix.fetch(1, compute_window_s=window_s, layers=layers, **options) as delivery:
            prefix.check(delivery)
            return str(delivery.request_id)

    fetches = [Fetching(fetch, end) for end in ENDS]
    wait_until(lambda: served.state().delivery_count == len(ENDS), "all to wait for a rate")
    served.change(ScheduleChanges(epoch_s=0.001))
    return [served.trace(fetching.outcome()) for fetching in fetches]


def layer_stamps(trace: DeliveryTrace) -> list[Stamp]:
    """When each layer, which is a fragment, was in place."""
    stamps: list[Stamp] = []
    for layer in trace.layers:
        assert layer.ready_s is not None
        stamps.append(Stamp(trace.started_unix_s + layer.ready_s, LAYOUT.per_layer_chunk_bytes))
    return stamps


@pytest.mark.parametrize("policy", POLICIES)
def test_a_server_keeps_to_the_rates_that_it_tells_and_to_the_cap(
    served: ScheduledServer, prefix: Prefix, policy: PolicyName
) -> None:
    def run() -> list[Achieved]:
        traces = traces_together(served, prefix, policy)
        check_window([stamp for trace in traces for stamp in layer_stamps(trace)])
        rates: list[Achieved] = []
        for trace in traces:
            assert trace.rate_bytes_per_s is not None
            assert trace.achieved_bytes_per_s is not None
            rates.append(Achieved(trace.rate_bytes_per_s, trace.achieved_bytes_per_s))
        assert sum(assigned for assigned, _ in rates) <= CAP_BYTES_PER_S + len(rates)
        return rates

    check_rates(run)


NIC_BYTES_PER_S = {"slow": 5e6, "fast": 15e6}  # of the cap's 25 MB/s
BESIDE_A_SLOW_NIC = 0.95  # of its rate


def test_a_slow_nic_is_kept_to_and_one_beside_it_has_its_whole_rate(
    served: ScheduledServer, prefix: Prefix
) -> None:
    served.begin_anew()
    served.change(ScheduleChanges(policy="stall_dynamic", cap_gbps=CAP_GBPS))

    def fetch_to(nic: str) -> Callable[[int], str]:
        def fetch(end_layer: int) -> str:
            rate = NIC_BYTES_PER_S[nic]
            with served.client(nic=nic, nic_bytes_per_s=rate) as client:
                mine = prefix.of_client(client)
                options = {"delivery": "layerwise", "transport": "shared_memory"}
                window_s = LAYOUT.per_layer_chunk_bytes / rate
                layers = (0, end_layer)
                with mine.fetch(1, compute_window_s=window_s, layers=layers, **options) as delivery:
                    mine.check(delivery)
                    return str(delivery.request_id)

        return fetch

    def run() -> list[Achieved]:
        fetches = {nic: Fetching(fetch_to(nic), LAYOUT.num_layers) for nic in NIC_BYTES_PER_S}
        rates: list[Achieved] = []
        for nic, fetching in fetches.items():
            trace = served.trace(fetching.outcome())
            assert trace.nic == nic
            stamps = layer_stamps(trace)
            sent = sum(stamp.length_bytes for stamp in stamps[1:])
            took_s = stamps[-1].at_s - stamps[0].at_s
            rates.append(Achieved(NIC_BYTES_PER_S[nic], sent / took_s))
        return rates

    check_rates(run, BESIDE_A_SLOW_NIC)
    nics = {one.nic: one for one in served.state().nics}
    assert {nic: one.nic_bytes_per_s for nic, one in nics.items()} == NIC_BYTES_PER_S
    assert all(one.sent_bytes for one in nics.values())
    assert not any(one.queued_bytes or one.deliveries for one in nics.values())
