"""`objectcache admin`: look at a running storage server, and change what an operator may change.

`app`, `schedule` and `trace` declare the commands, `command` is what they share, `storage_socket`
asks the server, `amounts` reads and writes sizes, times and rates, `policies` reads what changes in
a bucket's policy and shows it, `schedule_flags` and `schedule_view` do that for the schedule,
`status_view` shows the engine, `fsck` a check, `trace_view` and `trace_svg` a delivery's trace,
whose times `layer_times` works out. Whoever may open the server's socket, its own user, may use
them.
"""
