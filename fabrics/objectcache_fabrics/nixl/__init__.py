"""NIXL: its agent, the side that registers memory (`endpoint`), and the one that writes."""
