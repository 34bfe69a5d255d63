"""The paper's experiments on real bytes: `python -m benchmarks.figures`."""
