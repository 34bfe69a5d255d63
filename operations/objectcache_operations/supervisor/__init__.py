"""`objectcache serve`: one storage server, the gateways and the admin server, kept running."""
