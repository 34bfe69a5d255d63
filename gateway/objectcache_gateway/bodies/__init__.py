"""Bodies on their way in: unwrapped, hashed and verified."""
