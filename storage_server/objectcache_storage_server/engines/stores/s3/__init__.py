"""Any S3 that has conditional PUT, by the library obstore."""
