"""Extents, free space and what the store holds, in memory."""
