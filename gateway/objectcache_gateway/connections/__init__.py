"""Clients' connections: how many there may be, and who goes where there are too many."""
