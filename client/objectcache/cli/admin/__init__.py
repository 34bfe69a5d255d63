"""`objectcache admin`: look after a running server, by its admin API.

`app` puts the commands together; `users`, `keys`, `tokens`, `quota`, `buckets`, `usage`, `top`,
`schedule`, `trace`, `state` and `backups` declare them. `command` is what they share: which server,
the flags for it, and how a command ends. `api_client` asks the server, `name_arguments` completes
names from it, `pages` reads whole lists.

Pure: `amounts` reads and writes sizes, times and rates; `grants`, `quotas`, `policies` and
`schedule_flags` read what an operator wrote; `tables`, `status_view`, `schedule_view`, `top_view`,
`trace_view`, `trace_svg` and `documents` show what the server said, `layer_times` works a trace's
times out, and `printable` makes text of others fit for a terminal. `fsck` watches a check.
"""
