"""The LMDB index: what is stored where, durably."""
