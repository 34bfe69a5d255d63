"""The bucket that a connector keeps KV in: what is told and asked of it, when it is left alone."""
