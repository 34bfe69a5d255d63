"""`objectcache admin`: what the servers do now."""
