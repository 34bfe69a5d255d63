"""Buckets that are copied between servers."""
