"""What a tenant notices while others attack the server."""
