"""Deliveries that several storage servers share, each with its part of the chunks."""
