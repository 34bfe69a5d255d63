"""`objectcache admin`: look after a running server, by its admin API.

`app` puts the commands together. `accounts`, `storage`, `schedule`, `traces` and `status` declare
them and show what the server said. `command` is what they share: which server, the flags for it,
and how a command ends. `copying` asks S3 ports instead. `api_client` asks the server,
`name_arguments` completes names from it, `pages` reads whole lists; `tables`, `documents` and
`printable` make text of what it answered.
"""
