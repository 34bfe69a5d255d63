"""The local engine: extents on a device, and an LMDB index. See docs/local_engine.md."""
