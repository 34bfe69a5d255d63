"""Routes of buckets, backups, the engine and the schedule."""
