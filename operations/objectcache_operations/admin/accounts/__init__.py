"""`objectcache admin`: users, keys, grants, tokens, quotas and usage."""
