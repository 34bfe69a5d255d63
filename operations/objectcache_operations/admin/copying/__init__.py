"""`objectcache admin copy`: KV buckets from one ObjectCache to another, while both serve.

`copy_command` declares it, `endpoints` reaches the two, `listings` reads what they hold, and
`inventory` compares that; `copy_chunks` moves what is missing.
"""
