"""Rows of LMDB that the engines with such an index share: sealed, under keys of any length."""
