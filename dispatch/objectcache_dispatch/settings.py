"""What the owner of a router may tune; the defaults are the paper's."""

from __future__ import annotations

import math
from dataclasses import dataclass

from objectcache_dispatch.checks import check_at_least, check_positive
from objectcache_schemas.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """`beta_tokens`: tokens that one GPU prefills in 5 s; a worker with more gets nothing.

    `alpha_s`: a storage NIC that is busy for longer has a long queue. `slack`: of the mean, in Z.
    `any_node`: nodes without either worker may relay, too. `lease_s`: a request that nobody renews
    for so long is given up by `expire`. `report_age_s_max`: a node whose last report is older does
    not relay for others; infinite where nobody reports. `waiting_max`: requests that wait.
    `needs_decode`: requests need a decode worker even while the topology has none, because its
    nodes come and go; otherwise such a topology is one of prefill alone.
    """

    beta_tokens: float
    alpha_s: float = 3.0
    slack: float = 1.05
    any_node: bool = True
    lease_s: float = 60.0
    report_age_s_max: float = math.inf
    waiting_max: int = 1_000_000
    needs_decode: bool = False

    def __post_init__(self) -> None:
        check_positive("beta_tokens", self.beta_tokens)
        check_positive("alpha_s", self.alpha_s)
        check_at_least("slack", self.slack, 1)
        check_positive("lease_s", self.lease_s)
        check_at_least("waiting_max", self.waiting_max, 1)
        if not self.report_age_s_max > 0:
            raise InvalidRequest(f"report_age_s_max is {self.report_age_s_max}; above 0 or inf")
