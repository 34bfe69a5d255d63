"""What is done to a store besides puts and gets: recovery, eviction, moves, checks."""
