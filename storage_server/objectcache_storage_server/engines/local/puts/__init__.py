"""Objects on their way into extents."""
