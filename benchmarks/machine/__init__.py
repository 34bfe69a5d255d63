"""What this machine itself can do: its device, its page cache, its loopback."""
