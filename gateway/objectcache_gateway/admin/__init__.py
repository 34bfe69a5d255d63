"""The admin API: users, buckets, the schedule, health and metrics over HTTP and JSON.

`python -m objectcache_gateway.admin` runs it, a process of its own, so that neither a scrape nor an
operator waits behind the data path. `api` lists all routes and `server` serves them, both with what
is in `serving/`: `routes` says what a route is, `openapi` describes them, `admin_connections` are
bounded, `read_requests` reads what is asked, `authentication` says who asks, `scopes` what they
may, `change_audit` keeps what they changed; `accounts_view` and `gateway_processes` are what
handlers reach. The routes themselves are in `accounts/`, `store/` and `processes/`.
"""
