"""What engines on this machine share: folders, flushes, reserves, the system's errors."""
