"""Every request on record: the access log, and the audit log in S3's own format."""
