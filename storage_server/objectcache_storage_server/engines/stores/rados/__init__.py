"""RADOS, Ceph's object store, as a shared store: see `rados_store.py`."""
