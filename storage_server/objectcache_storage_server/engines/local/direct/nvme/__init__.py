"""NVMe commands to a namespace, past the file system."""
