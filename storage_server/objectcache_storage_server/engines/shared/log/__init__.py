"""The commit log: its records, appending, following and checkpoints."""
