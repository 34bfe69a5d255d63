"""What a process on a node has: clients of the gateway and of relays, prompts, engines."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from benchmarks.dual_path.prefixes import CHUNK_TOKENS, Prompt, PromptShape, prompt_of
from benchmarks.dual_path.volume import Volume
from objectcache import Client, KvBucket
from objectcache.sessions.fabric_joining import FabricSettings
from objectcache_laboratory.reference_engine.engine import ReferenceEngine

DIRECT, AUTO, SPLIT = "direct", "auto", "split"
EVERY_DEVICE = ""  # UCX finds the one by which an address is reached
BUCKET = "prompts"
UCX_OVER_TCP = "TLS=tcp"
TIMEOUT_S = 120.0


def over(relay: str) -> str:
    """The route over a relay."""
    return f"relay:{relay}"


@dataclass(frozen=True, slots=True)
class Reached:
    """Where a process on a node reaches what it needs."""

    node: str
    endpoint: str
    access_key: str
    secret_key: str
    relays: Mapping[str, str]  # URLs, by names
    transport: str
    volume: Volume

    @property
    def shape(self) -> PromptShape:
        """Of the prompts."""
        return self.volume.shape


def meet(side: NodeSide, reached: Reached) -> None:
    """Have a process know other servers and relays."""
    side.close()
    side.reached = reached


class NodeSide:
    """The state of one process."""

    def __init__(self, reached: Reached) -> None:
        self.reached = reached
        self.listener: socket.socket | None = None
        self.layout = reached.shape.model.kv_layout(CHUNK_TOKENS)
        self._engines = threading.local()

    @cached_property
    def client(self) -> Client:
        """Of the gateway and of all relays."""
        reached = self.reached
        return Client(
            reached.endpoint,
            access_key=reached.access_key,
            secret_key=reached.secret_key,
            transport=reached.transport,
            timeout_s=TIMEOUT_S,
            fabric=FabricSettings(EVERY_DEVICE, UCX_OVER_TCP),
            relays=[f"{name}={url}" for name, url in reached.relays.items()],
            route=DIRECT,
            node=reached.node,
            route_bytes_min=0,  # a quick run's are small
            relay_timeout_s=reached.volume.relay_timeout_s,
        )

    @cached_property
    def bucket(self) -> KvBucket:
        """The prompts', which is made where it is missing."""
        return self.client.kv_bucket(BUCKET, self.layout, create=True)

    def prompt(self, number: int) -> Prompt:
        """A prompt of this run's shape."""
        return prompt_of(self.reached.shape, number)

    def keys(self, number: int) -> list[str]:
        """Its prefix' chunk keys."""
        return self.layout.chunk_keys(self.prompt(number).prefix)

    def engine(self) -> ReferenceEngine:
        """This thread's."""
        if not hasattr(self._engines, "own"):
            self._engines.own = ReferenceEngine(self.reached.shape.model)
        engine: ReferenceEngine = self._engines.own
        return engine

    def close(self) -> None:
        """Close the client."""
        self.__dict__.pop("bucket", None)
        client: Client | None = self.__dict__.pop("client", None)
        if client is not None:
            client.close()

    def __repr__(self) -> str:
        return f"<NodeSide {self.reached.node}>"
