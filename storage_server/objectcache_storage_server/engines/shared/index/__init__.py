"""The replayed index: what the log's records add up to, in LMDB."""
