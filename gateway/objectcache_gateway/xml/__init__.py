"""S3's XML, read and written. Pure."""
