"""What a request means: pure decisions over its head and its XML."""
