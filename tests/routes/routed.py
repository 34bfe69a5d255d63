"""Clients with relays, and what they are to receive."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from objectcache import Client
from objectcache.deliveries.delivery import Delivery
from tests.integration.served import wait_until
from tests.relay.relays import BUCKET, CHUNKS, LAYOUT, TOKENS, RunningRelay, nothing_left
from tests.servers import RunningServer

KEYS = LAYOUT.chunk_keys(TOKENS)
PATIENT_S = 20.0  # a busy machine is no silence of a relay
EXPECTED = CHUNKS.transpose(1, 0, 2)  # uint8[num_layers, chunks, slice bytes]


def routed_client(
    server: RunningServer,
    *relays: RunningRelay,
    transport: str = "body",
    urls: Sequence[str] = (),
    **how: Any,
) -> Client:
    """A client whose relays, or what stands for them at `urls`, are called b, c, ...; the caller
    closes it. It waits for relays as a busy machine needs it, unless it is told otherwise.
    """
    how.setdefault("relay_timeout_s", PATIENT_S)
    credentials = server.credentials
    return Client(
        server.endpoint,
        access_key=credentials.access_key,
        secret_key=credentials.secret_key,
        transport=transport,
        relays=[
            f"{name}={url}"
            for name, url in zip("bcdef", urls or [one.endpoint for one in relays], strict=False)
        ],
        **how,
    )


def fetch(client: Client, **how: Any) -> Delivery:
    """A delivery of all, layer by layer unless said otherwise."""
    how.setdefault("delivery", "layerwise")
    return client.kv_bucket(BUCKET, LAYOUT).fetch(KEYS, **how)


def check_delivery(delivery: Delivery) -> None:
    """All layers come, and every byte is right."""
    for layer, payload in delivery:
        assert np.array_equal(payload, EXPECTED[layer]), f"layer {layer}"


def wait_quiet(*relays: RunningRelay) -> None:
    """Until no relay has a delivery, or landing memory that is in use."""
    for relay in relays:
        wait_until(partial(nothing_left, relay), f"nothing is left in {relay}")
