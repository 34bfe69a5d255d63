"""A store with its gateway, relays and engines, each in its namespace."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.basis.bench import Bench
from benchmarks.basis.server import Server, running_server
from benchmarks.dual_path.namespaces import (
    KV_DSCP,
    PREFILL,
    NodeNetwork,
    node_network,
)
from benchmarks.dual_path.node_process import NodeProcess
from benchmarks.dual_path.node_side import UCX_OVER_TCP, Reached, meet
from benchmarks.dual_path.volume import Volume
from tests.servers import RUN_DIR_PARENT, ServerProcess

CACHED = f"storage.page_cache_bytes={1 << 40}"  # everything: links are measured, and no device
NIXL = ("storage.nixl=trusting", "storage.nixl_devices=", f"storage.nixl_ucx={UCX_OVER_TCP}")


class NodeRelay:
    """The relay of a node, which listens on its compute network."""

    def __init__(self, name: str, process: ServerProcess, run_dir: Path) -> None:
        self.name = name
        self.process = process
        self._run_dir = run_dir
        self.endpoint = process.wait_ready()

    def stop(self) -> None:
        """End it, if it runs; a second call has no effect."""
        self.process.terminate()
        shutil.rmtree(self._run_dir, ignore_errors=True)

    def __repr__(self) -> str:
        return f"<NodeRelay {self.name} {self.endpoint}, pid {self.process.pid}>"


class Cluster:
    """What runs. `transport` is how deliveries reach relays and engines: body or nixl."""

    def __init__(
        self, network: NodeNetwork, server: Server, folder: Path, transport: str, stack: ExitStack
    ) -> None:
        self.network = network
        self.server = server
        self.transport = transport
        self.relays: dict[str, NodeRelay] = {}
        self._idle: dict[str, list[NodeProcess]] = {}
        self._folder = folder
        self._stack = stack

    def endpoint_of(self, node: str) -> str:
        """The gateway's URL over a node's storage link."""
        port = self.server.endpoint.rpartition(":")[2]
        return f"http://{self.network.nodes[node].store_address}:{port}"

    def add_relay(
        self, node: str, *settings: str, name: str = "", is_marked: bool = True
    ) -> NodeRelay:
        """Start a relay on a node, by default under the node's name."""
        name = name or node
        run_dir = Path(RUN_DIR_PARENT) / f"objectcache-relay-{secrets.token_hex(4)}"
        of_node = self.network.nodes[node]
        every = (
            f"relay.listen={of_node.compute_address}:0",
            f"relay.endpoint={self.endpoint_of(node)}",
            f"relay.credentials={self._credentials_file()}",
            f"relay.transport={self.transport}",
            "relay.wait_s=60",
            "relay.metrics_listen=off",
            "relay.hold_s=0",  # a prefix is read as often as it is asked for
            f"relay.ip_dscp={KV_DSCP if is_marked else 0}",
            "relay.log_level=warning",
            f"server.run_dir={run_dir}",
            *NIXL,
            *settings,
        )
        arguments = [part for one in every for part in ("--set", one)]
        log = self._folder / f"relay-{name}.log"
        process = ServerProcess("objectcache_relay", arguments, log, within=of_node.within)
        self.relays[name] = NodeRelay(name, process, run_dir)
        self._stack.callback(self.relays[name].stop)
        return self.relays[name]

    def engine(self, node: str, volume: Volume, relays: Sequence[str] | None = None) -> NodeProcess:
        """A process on a node, which knows these relays, or all that there are."""
        reached = Reached(
            node,
            self.endpoint_of(node),
            self.server.access_key,
            self.server.secret_key,
            {name: self.relays[name].endpoint for name in relays or self.relays},
            self.transport,
            volume,
        )
        idle = self._idle.get(node)
        if idle:
            process = idle.pop()
            process.call(meet, reached)
            return process
        process = NodeProcess(self.network.nodes[node], reached, self._folder / f"{node}.log")
        self._stack.callback(process.close)
        return process

    def give_back(self, *processes: NodeProcess) -> None:
        """They are for whoever asks next for one on their nodes."""
        for process in processes:
            self._idle.setdefault(process.node.name, []).append(process)

    @contextmanager
    def flag(self) -> Generator[Path]:
        """The name of a file that is not there, and is removed at the end."""
        file = self._folder / f"flag-{secrets.token_hex(4)}"
        try:
            yield file
        finally:
            file.unlink(missing_ok=True)

    def _credentials_file(self) -> Path:
        return self._folder / "data" / "root-credentials"


@contextmanager
def cluster(bench: Bench, relay_nodes: Sequence[str], transport: str) -> Generator[Cluster]:
    """A store, and the nodes `p0` and those of the relays, which `add_relay` starts.

    Raises `NotPossible` with the reason where there can be no namespaces.
    """
    with ExitStack() as stack:
        network = stack.enter_context(node_network([PREFILL, *relay_nodes]))
        folder = stack.enter_context(bench.place())
        server = stack.enter_context(
            running_server(
                folder / "data",
                CACHED,
                *NIXL,
                host="0.0.0.0",
                within=network.store_within,
            )
        )
        yield Cluster(network, server, folder, transport, stack)
