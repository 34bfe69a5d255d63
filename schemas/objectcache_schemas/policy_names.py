"""The names of what an operator may choose of a schedule, each said once."""

from __future__ import annotations

from typing import Literal, get_args

PolicyName = Literal[
    "equal", "kv_prop", "bw_prop", "stall_opt", "calibrated_stall_opt", "stall_dynamic"
]
RatesName = Literal["every_epoch", "for_life"]  # how long an assigned rate holds
EVERY_EPOCH: RatesName = "every_epoch"
FOR_LIFE: RatesName = "for_life"
RouteName = Literal["shorter_queue", "shortest_time", "least_lateness", "split"]
ROUTE_POLICIES: tuple[RouteName, ...] = get_args(RouteName)
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
RATES: tuple[RatesName, ...] = get_args(RatesName)
