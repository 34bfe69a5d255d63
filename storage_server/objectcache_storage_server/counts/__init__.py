"""What a storage server counts, from any thread."""
