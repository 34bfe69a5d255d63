"""`objectcache admin checkpoint`: a checkpoint of a shared store, now."""

from __future__ import annotations

from objectcache_operations.admin.command import Server, on_server


@on_server
def checkpoint(server: Server) -> None:
    """Store a copy of a shared store's index, and trim its log behind the one before.

    Servers do so by themselves from time to time; a server that starts reads the newest.
    """
    from objectcache_runtime.amounts import size_text
    from objectcache_schemas.operators.admin_api import CHECKPOINT_TIMEOUT_S, CheckpointView

    with server.connect(CHECKPOINT_TIMEOUT_S) as client:
        taken = client.send("POST", "/v1/checkpoints", None, CheckpointView)
    server.show(
        taken,
        lambda: [
            f"took the checkpoint {taken.number:,}: {size_text(taken.size_bytes)} "
            f"in {taken.taken_s:.1f} s"
        ],
    )
