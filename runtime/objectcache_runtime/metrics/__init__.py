"""The numbers of a process, and how Prometheus reads them."""
