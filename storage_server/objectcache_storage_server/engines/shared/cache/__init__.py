"""A cache of the store's objects on a device of this server."""
