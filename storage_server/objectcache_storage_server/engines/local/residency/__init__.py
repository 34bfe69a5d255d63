"""Which extents the page cache serves."""
