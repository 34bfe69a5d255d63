"""Multipart uploads."""
