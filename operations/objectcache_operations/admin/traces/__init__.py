"""`objectcache admin`: traces of deliveries."""
