"""Verbs: the client's end of a connection that a storage server writes layers through."""
