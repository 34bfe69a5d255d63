"""Whose KV it is: the model, its files and adapters, and how they name what is stored."""
