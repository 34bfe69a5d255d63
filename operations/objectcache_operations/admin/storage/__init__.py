"""`objectcache admin`: buckets, backups, checks and what the store holds."""
