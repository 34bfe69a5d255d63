"""Fetching and putting: layers on their way, and who waits for them."""
