"""`objectcache admin`: the schedule."""
