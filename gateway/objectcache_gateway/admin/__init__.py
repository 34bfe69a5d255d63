"""The admin API: users, buckets, the schedule, health and metrics over HTTP and JSON.

`python -m objectcache_gateway.admin` runs it, a process of its own, so that neither a scrape nor an
operator waits behind the data path. `routes` says what a route is, `api` lists them all, and
`openapi` describes them. `server` serves them on `connections` that are bounded, `requests` reads
what is asked, `authentication` says who asks, `scopes` what they may, `audit` keeps what they
changed. `accounts_view` and `gateway_processes` are what handlers reach. The other modules hold the
routes of what they are named after: `users`, `keys`, `tokens`, `buckets`, `usage`, `engine`,
`schedule`, `processes`, `backup`, `metrics_page`, `status`.
"""
