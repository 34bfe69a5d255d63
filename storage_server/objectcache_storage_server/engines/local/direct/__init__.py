"""Ways to submit reads and writes past the page cache."""
