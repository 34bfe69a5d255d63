"""The storage server as the gateway reaches it."""
