"""The dispatch service: `objectcache_dispatch` over HTTP, for routers that are not in Python.

`python -m objectcache_gateway.dispatch_service` runs it, a process of its own that needs no storage
server. `cluster_state` is all that it knows and decides, without a socket or a clock; `server` is
HTTP around it; `families` what Prometheus reads, `recent_reads` a number of those; `token` says
who may ask, `topology_file` reads nodes that need not register.
"""
