"""Ordinary S3 requests, against Ceph's radosgw."""
