"""What comes in: the memory that deliveries land in, and the gets that may share what is there.

`landed_prefixes` has the deliveries under way or just over; `claims` says, purely, which get may be
sent what another had landed; `landing_grants` who gets memory, `landing_regions` the memory itself,
`upstream` where the bytes come from.
"""
