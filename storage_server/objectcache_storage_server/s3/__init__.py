"""S3's operations over any engine: objects, buckets, listing, uploads, copies, lifecycle."""
