"""Payloads of frames as they are stored, for readers that decode them."""
