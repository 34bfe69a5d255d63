"""Measurements of the real server, each beside the limit of the machine in the same run."""
