"""Whose fragment goes next, and when the link has room for it. Pure.

Read in this order: `due_times` (the plan of stall_dynamic), `pace_link`, `nic_paces` (the storage
NICs that deliveries go to), `delivery_flow` (a running delivery's account), `round_robin` (fair
shares), `keyed_line`, then the lanes: `fair_lane`, `rate_lane`, and `urgent_lane` with `due_part`
(who is planned together); `split_link` says what the pool and the others may claim of the link.
"""
