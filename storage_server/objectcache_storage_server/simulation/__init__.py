"""What if thousands of clients came: `objectcache simulate`, under virtual time.

The planner, the scheduler, its policies and admission are the server's own; engines, links and GPUs
are simulated. Read in this order: `arrivals` (who comes when, wanting what), `mooncake` and `mix`
(where arrivals come from), `tenant_shares` (whose weights and caps differ), `machine` (what carries
the bytes, and what computes), `run` (virtual time), `measures` (what it cost), `report` and `plot`,
`__main__` (flags).
"""
