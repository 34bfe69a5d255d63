"""Messages between the storage server and whoever speaks to it, a module a conversation."""
