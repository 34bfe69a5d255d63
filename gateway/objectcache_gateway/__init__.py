"""The gateway: S3 over HTTP, and the extension, in front of a storage server. It keeps no state."""
