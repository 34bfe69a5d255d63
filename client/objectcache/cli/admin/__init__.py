"""`objectcache admin`: look at a running storage server, and change what an operator may change.

`app` declares the commands, `storage_socket` asks the server, `amounts` reads and writes sizes and
times, `policies` reads what changes in a bucket's policy and shows it, `status_view` shows the
engine, `fsck` a check. Whoever may open the server's socket, its own user, may use them.
"""
