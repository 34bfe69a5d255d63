"""A cluster of prefill and decode nodes in virtual time, dispatched by `objectcache_dispatch`.

Read in this order: `models` and `trajectories` (what is computed and read), `cluster` (NICs, GPUs),
`run` (events), `measures`, `report`. `two_nics` is one experiment without GPUs. Nothing here asks a
clock or a random source that has no seed: the same arguments give the same events.
"""
