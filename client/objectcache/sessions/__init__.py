"""Connections to the storage server: they register memory and hear of layers."""
