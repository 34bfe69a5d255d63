"""Replay of a request trace against a running server, every delivered byte checked.

Read in this order: `trace` (the file), `workload` (geometry, keys, what must hit), `kv_bytes` (the
bytes behind a key), `run` (one request, and many), `report` (what came of it).
"""
