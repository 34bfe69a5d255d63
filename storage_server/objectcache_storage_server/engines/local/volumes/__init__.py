"""The address space that extents lie in."""
