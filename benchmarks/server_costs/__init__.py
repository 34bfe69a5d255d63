"""What the server spends beside moving bytes: planning, scheduling, memory, many objects."""
