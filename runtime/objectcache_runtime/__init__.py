"""What every process of ObjectCache is started, configured, logged, measured and connected with."""
