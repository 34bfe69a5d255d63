"""A working set larger than memory, beside plain buffered reads."""
