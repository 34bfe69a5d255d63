"""Bursts of other traffic on a compute link that is full of KV, unmarked and marked.

Bursts go from the relay's node to the prefill node, as an engine's own traffic would, each in a
connection that is kept: 64 KiB there, an octet back. Their processes run in real time, so that a
busy machine's queue of processes is not what is measured. The storage link has no bound here.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.basis.measure import Row, milliseconds
from benchmarks.dual_path.carried import check_count
from benchmarks.dual_path.deliveries import prefill_until
from benchmarks.dual_path.namespaces import PREFILL
from benchmarks.dual_path.node_process import NodeProcess
from benchmarks.dual_path.node_side import NodeSide, over
from benchmarks.dual_path.running import GROUP, Running
from objectcache_schemas.limits import KIB

BURST_BYTES = 64 * KIB
GOAL, RATE_GOAL = "<= 0.25", ">= 0.9"
PLAIN = "plain"  # the relay whose KV has no mark
SILENCE_S = 30.0
FLOWS_AFTER = 2  # deliveries
IN_FLIGHT = 8  # deliveries of KV at a time, so that the link is full
LOOK_PAUSE_S = 0.005


def listen_for_bursts(side: NodeSide) -> int:
    """Open a port on the compute network; `receive_bursts` takes what comes."""
    side.listener = socket.create_server(("", 0))
    port: int = side.listener.getsockname()[1]
    return port


def receive_bursts(side: NodeSide) -> int:
    """Answer every burst of one connection; how many there were."""
    assert side.listener is not None
    _run_in_real_time()
    memory = memoryview(bytearray(BURST_BYTES))
    count = 0
    with side.listener.accept()[0] as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while connection.recv_into(memory, BURST_BYTES, socket.MSG_WAITALL) == BURST_BYTES:
            connection.sendall(b"!")
            count += 1
    _run_in_turn()
    return count


def send_bursts(
    side: NodeSide, address: str, port: int, count: int, period_s: float
) -> tuple[float, ...]:
    """Round trips in seconds of so many bursts, one every `period_s` at most."""
    _run_in_real_time()
    burst = os.urandom(BURST_BYTES)
    round_trips_s: list[float] = []
    with socket.create_connection((address, port), SILENCE_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        due_s = time.monotonic()
        for _ in range(count):
            due_s += period_s
            time.sleep(max(0.0, due_s - time.monotonic()))
            at_s = time.monotonic()
            connection.sendall(burst)
            if connection.recv(1) != b"!":
                raise ConnectionError("the receiver of bursts has ended")
            round_trips_s.append(time.monotonic() - at_s)
    _run_in_turn()
    return tuple(round_trips_s)


def _run_in_real_time() -> None:
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def _run_in_turn() -> None:
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


@dataclass(frozen=True, slots=True)
class Contended:
    """One round on the full link."""

    round_trips_s: tuple[float, ...]
    kv_bytes_per_s: float  # by the kernel's count, headers included


class BurstPair:
    """Two processes: one that sends bursts from a relay's node, one that answers them."""

    def __init__(self, running: Running, node: str) -> None:
        self._volume = running.volume
        self._cluster = running.cluster
        self._address = running.network.nodes[PREFILL].compute_address
        self._receiver = running.cluster.engine(PREFILL, running.volume)
        self._sender = running.cluster.engine(node, running.volume)
        self._port = self._receiver.call(listen_for_bursts)

    def round_trips_s(self) -> tuple[float, ...]:
        """Send as many as the volume says."""
        count, period_s = self._volume.burst_count, self._volume.burst_period_s
        received = self._receiver.begin(receive_bursts)
        sent = self._sender.call(send_bursts, self._address, self._port, count, period_s)
        assert received.result() == count
        return sent

    def close(self) -> None:
        """Give both back."""
        self._cluster.give_back(self._sender, self._receiver)


def measure_traffic_classes(running: Running) -> Iterator[Row]:
    """Rows for bursts beside nothing, beside KV without a mark, and with one."""
    node = running.volume.relay_nodes[0]
    cluster = running.cluster
    running.network.shape_storage(node, None)
    running.network.shape_compute(node, running.volume.burst_link_bytes_per_s)
    running.network.shape_compute(PREFILL, None)
    cluster.add_relay(node, name=PLAIN, is_marked=False)
    patient = replace(running.volume, relay_timeout_s=SILENCE_S)  # no KV is to go elsewhere
    engine = cluster.engine(PREFILL, patient)
    pair = BurstPair(running, node)
    alone = pair.round_trips_s()
    rounds: dict[str, list[Contended]] = {"unmarked": [], "marked": []}
    for _ in range(running.volume.rounds):
        for name, relay in (("unmarked", PLAIN), ("marked", node)):
            rounds[name].append(_contended(running, engine, pair, node, relay))
    pair.close()
    cluster.give_back(engine)
    cluster.relays[PLAIN].stop()
    yield from _rows(running, alone, rounds)


def _contended(
    running: Running, engine: NodeProcess, pair: BurstPair, node: str, relay: str
) -> Contended:
    network = running.network
    payload_bytes = running.volume.shape.payload_bytes
    numbers = list(range(running.volume.deliveries))
    with running.cluster.flag() as stop:
        marked, before = network.marked_bytes(node), network.compute_bytes(PREFILL)
        deliveries = engine.begin(prefill_until, numbers, over(relay), IN_FLIGHT, stop)
        while network.compute_bytes(PREFILL) - before < FLOWS_AFTER * payload_bytes:
            time.sleep(LOOK_PAUSE_S)
        sent, begun_s = network.compute_bytes(PREFILL), time.monotonic()
        round_trips_s = pair.round_trips_s()
        sent, taken_s = network.compute_bytes(PREFILL) - sent, time.monotonic() - begun_s
        stop.touch()
        delivered_bytes = deliveries.result() * payload_bytes
    is_marked = relay == node
    check_count(
        f"the class of KV on {node}",
        network.marked_bytes(node) - marked,
        delivered_bytes if is_marked else 0,
    )
    burst_bytes = len(round_trips_s) * BURST_BYTES
    check_count(
        f"the compute link of {PREFILL}",
        network.compute_bytes(PREFILL) - before,
        delivered_bytes + burst_bytes,
    )
    return Contended(round_trips_s, (sent - burst_bytes) / taken_s)


def _rows(
    running: Running, alone: Sequence[float], rounds: dict[str, list[Contended]]
) -> Iterator[Row]:
    link = f"a link of {running.volume.burst_link_bytes_per_s / 1e6:g} MB/s"
    wire_ms = 1e3 * BURST_BYTES / running.volume.burst_link_bytes_per_s
    trips = {
        name: [trip for one in done for trip in one.round_trips_s] for name, done in rounds.items()
    }
    p99 = {name: float(np.percentile(each, 99)) for name, each in trips.items()}
    yield Row(
        GROUP,
        f"bursts of 64 KiB on {link}, alone",
        "ms",
        milliseconds(alone),
        None,
        "",
        "",
        f"{wire_ms:.1f} ms, less where the link's burst has room",
    )
    for name, each in trips.items():
        is_marked = name == "marked"
        yield Row(
            GROUP,
            f"bursts beside {name} KV in bodies (the ratio is of the 99th percentiles)",
            "ms",
            milliseconds(each),
            p99["marked"] / p99["unmarked"] if is_marked else None,
            "unmarked" if is_marked else "",
            GOAL if is_marked else "",
            f"{wire_ms:.1f} ms, and what of KV is being sent" if is_marked else "a queue of KV",
        )
    unmarked = statistics.median(one.kv_bytes_per_s for one in rounds["unmarked"])
    for name, done in rounds.items():
        rates = tuple(one.kv_bytes_per_s / 1e6 for one in done)
        is_marked = name == "marked"
        yield Row(
            GROUP,
            f"{name} KV beside the bursts, on {link}",
            "MB/s",
            rates,
            statistics.median(rates) * 1e6 / unmarked if is_marked else None,
            "unmarked" if is_marked else "",
            RATE_GOAL if is_marked else "",
            "what the bursts leave",
        )
