"""One file an object beside an SQLite index: the plain durable engine."""
