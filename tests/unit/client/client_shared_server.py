"""A scripted gateway and target socket whose deliveries a test plays by hand."""

from __future__ import annotations

import queue
import threading
from pathlib import Path

from objectcache import Client
from objectcache_schemas.messages.sessions import LayersReady
from tests.unit.client.client_fakes import (
    DEADLINE_S,
    LAYOUT,
    FakeGateway,
    FakeTargetSocket,
    Peer,
    Received,
    payload_of,
)


class SharedServer:
    """A scripted server whose deliveries a test plays by hand, one `next_get` each."""

    def __init__(self, directory: Path) -> None:
        self.targets = FakeTargetSocket(directory)
        self.gateway = FakeGateway(self.serve)
        self.gets: queue.SimpleQueue[tuple[Received, Peer]] = queue.SimpleQueue()
        self._accepting = threading.Lock()
        self.host_id: str | None = None
        self.session_requests = 0
        self.mode = "layerwise"
        self.refuse_gets_into_targets = b""

    def serve(self, request: Received, peer: Peer) -> None:
        if "kv-session" in request.target:
            self.session_requests += 1
            peer.answer(body=self.targets.invitation(self.host_id))
        elif request.descriptor.rdma_target is None:
            peer.answer_delivery("layerwise", 5, payload_of(5))
        elif self.refuse_gets_into_targets:
            peer.answer(404, body=self.refuse_gets_into_targets)
        else:
            with self._accepting:  # the client may send the next one once it has the head
                peer.start_outcome(self.mode, len(request.descriptor.chunk_keys))
                self.gets.put((request, peer))

    def client(self, **options: object) -> Client:
        return self.gateway.client(**{"transport": "auto", "timeout_s": DEADLINE_S} | options)

    def next_get(self) -> Playing:
        return Playing(self, *self.gets.get(timeout=DEADLINE_S))

    def close(self) -> None:
        self.gateway.listener.close()
        self.targets.close()


class Playing:
    """The server's side of one delivery."""

    def __init__(self, server: SharedServer, request: Received, peer: Peer) -> None:
        target = request.descriptor.rdma_target
        assert target is not None
        self.server, self.peer, self.target = server, peer, target
        self.memory = server.targets.memory[target.target_id]

    def write(self, payload: bytes) -> None:
        self.memory[: len(payload)] = payload

    def announce(self, end_layer: int) -> None:
        self.server.targets.send(LayersReady(tag=self.target.tag, end_layer=end_layer))

    def finish(self, payload: bytes) -> None:
        self.write(payload)
        self.announce(LAYOUT.num_layers)
        self.peer.send_outcome()
