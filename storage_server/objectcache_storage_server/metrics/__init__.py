"""What a storage server counts, and how it is read."""
