"""Prefixes there and back: cold, warm, first layers, puts, small chunks, NIXL."""
