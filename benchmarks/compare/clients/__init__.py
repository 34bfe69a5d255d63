"""The stores' clients, each behind one contract."""
