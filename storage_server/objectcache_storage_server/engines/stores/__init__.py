"""Stores that several storage servers share: Ceph's RADOS, any S3, DAOS, a shared folder."""
