"""Engines whose KV is stored in a lossy dtype."""
