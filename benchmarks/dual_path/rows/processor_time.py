"""What a relay costs the processor, beside one plain stream over the loopback, and beside the least
that takes bytes in over one link, has them in memory, and sends them on over another.
"""

from __future__ import annotations

import resource
import socket
import statistics
from collections.abc import Iterator

import psutil

from benchmarks.basis.measure import Row
from benchmarks.dual_path.deliveries import prefill_all
from benchmarks.dual_path.namespaces import PREFILL
from benchmarks.dual_path.node_side import NodeSide, over
from benchmarks.dual_path.running import GROUP, Running
from objectcache_schemas.limits import KIB

GOAL = "<= 1.2"
PIECE_BYTES = 256 * KIB
AT_ONCE = 4
LOOPBACK = "127.0.0.1"


def listen_for_stream(side: NodeSide) -> int:
    """Open a port; `take_stream` takes what comes."""
    side.listener = socket.create_server(("", 0))
    port: int = side.listener.getsockname()[1]
    return port


def take_stream(side: NodeSide) -> float:
    """Receive one connection's bytes; seconds of processor time."""
    assert side.listener is not None
    memory = memoryview(bytearray(PIECE_BYTES))
    with side.listener.accept()[0] as connection:
        before_s = _own_processor_s()
        while connection.recv_into(memory):
            pass
        return _own_processor_s() - before_s


def send_stream(side: NodeSide, address: str, port: int, count: int) -> float:
    """Send so many pieces; seconds of processor time."""
    del side
    piece = bytes(PIECE_BYTES)
    with socket.create_connection((address, port)) as connection:
        before_s = _own_processor_s()
        for _ in range(count):
            connection.sendall(piece)
        return _own_processor_s() - before_s


def forward_stream(side: NodeSide, address: str, port: int, memory_bytes: int) -> float:
    """Send one connection's bytes on, a piece when all of it is in memory, which is used in turns
    as landing memory is; seconds of processor time.
    """
    assert side.listener is not None
    memory = memoryview(bytearray(memory_bytes))
    with side.listener.accept()[0] as taken, socket.create_connection((address, port)) as sent:
        before_s = _own_processor_s()
        at = 0
        while count := taken.recv_into(memory[at : at + PIECE_BYTES], 0, socket.MSG_WAITALL):
            sent.sendall(memory[at : at + count])
            at = (at + PIECE_BYTES) % memory_bytes
        return _own_processor_s() - before_s


def _own_processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure_processor_time(running: Running) -> Iterator[Row]:
    """Nanoseconds a byte, over links without a bound: a stream's two ends, and a relay, which is
    one end of each of two.
    """
    node = running.volume.relay_nodes[0]
    running.unbound_links()
    numbers = list(range(running.volume.deliveries))
    count_bytes = len(numbers) * running.volume.shape.payload_bytes
    process = psutil.Process(running.cluster.relays[node].process.pid)
    receiver, sender = (running.cluster.engine(node, running.volume) for _ in range(2))
    port = receiver.call(listen_for_stream)
    on_node = running.cluster.engine(node, running.volume)
    source, target = (running.cluster.engine(PREFILL, running.volume) for _ in range(2))
    in_port, out_port = on_node.call(listen_for_stream), target.call(listen_for_stream)
    addresses = {name: one.compute_address for name, one in running.network.nodes.items()}
    streams, forwards, relays = [], [], []
    for _ in range(running.volume.rounds):
        taken = receiver.begin(take_stream)
        sent_s = sender.call(send_stream, LOOPBACK, port, count_bytes // PIECE_BYTES)
        streams.append(1e9 * (sent_s + taken.result()) / count_bytes)
        taken = target.begin(take_stream)
        memory_bytes = AT_ONCE * running.volume.shape.payload_bytes
        passed = on_node.begin(forward_stream, addresses[PREFILL], out_port, memory_bytes)
        source.call(send_stream, addresses[node], in_port, count_bytes // PIECE_BYTES)
        forwards.append(1e9 * passed.result() / count_bytes)
        taken.result()
        before = process.cpu_times()
        running.engine.call(prefill_all, numbers, over(node), AT_ONCE)
        after = process.cpu_times()
        used_s = after.user + after.system - before.user - before.system
        relays.append(1e9 * used_s / count_bytes)
    running.cluster.give_back(sender, receiver, on_node, source, target)
    yield Row(
        GROUP,
        f"processor time of a plain stream over the loopback, both ends, {PIECE_BYTES >> 10} KiB",
        "ns/B",
        tuple(streams),
        None,
        "",
        "",
        "0.4 ns: a copy in and a copy out",
    )
    yield Row(
        GROUP,
        f"processor time of a plain forwarder, {PIECE_BYTES >> 10} KiB into memory and on",
        "ns/B",
        tuple(forwards),
        statistics.median(forwards) / statistics.median(streams),
        "the stream's",
        "",
        "a stream's, and more where links are no loopback: what a relay cannot be below",
    )
    yield Row(
        GROUP,
        f"processor time of a relay, {running.transport} in and out",
        "ns/B",
        tuple(relays),
        statistics.median(relays) / statistics.median(streams),
        "the stream's",
        GOAL,
        "a receiver's and a sender's",
    )
