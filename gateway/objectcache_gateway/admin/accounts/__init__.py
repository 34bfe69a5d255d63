"""Routes of users, keys, tokens and usage."""
