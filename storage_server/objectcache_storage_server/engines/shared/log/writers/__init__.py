"""Who writes to the log, and who is still alive."""
