"""Deliveries of which some chunks come as frames, and what decodes them."""
