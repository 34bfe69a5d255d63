"""What operators see and change: messages to the storage server, and the admin API."""
