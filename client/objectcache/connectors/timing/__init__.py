"""How long an engine computes on a layer: measured, learned, and told to the server."""
