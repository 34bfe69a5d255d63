"""What is stored: received from a gateway or read from a client's memory, and committed."""
