"""Engines as the contract's tests open them."""
