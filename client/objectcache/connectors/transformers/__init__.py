"""Hugging Face Transformers: a cache whose layers arrive one by one."""
