"""What survives when a process is killed, the power fails, or bytes rot."""
