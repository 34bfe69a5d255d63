"""A storage server's metrics by name."""
