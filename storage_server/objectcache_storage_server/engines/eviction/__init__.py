"""Which cache content goes first: prefixes from their ends, least recently used extents first."""
