"""Storing chunks: whole, or layer by layer."""
