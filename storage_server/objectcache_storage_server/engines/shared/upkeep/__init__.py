"""What is done to a shared store besides puts and gets: eviction, sweeping, checks."""
