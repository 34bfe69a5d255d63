"""Gets of prefixes: planned, read and delivered, from the request to the end."""
