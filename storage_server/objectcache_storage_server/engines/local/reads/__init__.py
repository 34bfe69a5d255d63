"""Held objects and verified reads over both paths."""
