"""DAOS as a shared store: see `daos_store.py`."""
