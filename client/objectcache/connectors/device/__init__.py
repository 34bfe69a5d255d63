"""Copies between an engine's GPU and host memory, beside what the engine computes."""
