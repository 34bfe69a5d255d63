"""What a relay says of itself, to engines that choose a route and to operators."""

from __future__ import annotations

from typing import Annotated

import msgspec

from objectcache_schemas.operators.dispatch_api import ByteCount, RateOrNone

REPORT_PATH = "/relay/report"


class RelayReport(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `GET /relay/report`, in JSON. What is out of bounds is no report."""

    read_queue_bytes: ByteCount  # asked of the relay, and not come over its storage NIC
    landing_free_bytes: ByteCount
    landing_bytes: ByteCount
    rate_bytes_per_s: RateOrNone  # at which bytes have come lately, 0 where none have
    deliveries: Annotated[int, msgspec.Meta(ge=0)]
    is_draining: bool
    # Since its start: bytes that came over its storage NIC, and such as went on to engines. What
    # grows is slow, what stands is silent. A relay that does not say it counts as standing.
    moved_bytes: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0
